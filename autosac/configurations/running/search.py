"""The search over a TorchTitan job's configurations: what `engine` asks, answered by bounds, sheets and evaluations.

Bounds of a layout, each tighter than the one before, all of them for every way of checkpointing
(`bounds.bounds`):

1. from the parameters' shapes: products at the peak rate, memory of states and layer inputs;
2. from the sheet of its microbatch: priced operators and collectives, least recomputation within the memory; of a pipeline,
   the longest path through its schedule;
3. its step without checkpointing, simulated.

A layout's plan is derived at first. Whoever would become the best by a plan is captured under it, and its value is that of the
capture. If that does not fit, the layout is planned for again, on captures. What cannot be made to fit rules out what needs
more memory (`running.too_large`).
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import replace
from functools import partial
from typing import Any

from autosac.configurations.bounds.bounds import memory_bound_bytes, recomputing_bound_ms, split_of
from autosac.configurations.bounds.known_bounds import LayoutBounds
from autosac.configurations.bounds.machines import Machines
from autosac.configurations.bounds.shapes import ModelCosts
from autosac.configurations.bounds.sheets import Sheet, runs_as_its_sheet, sheet_layout
from autosac.configurations.evaluating.evaluations import LayoutTask, PlanTask, PredictedStep, SheetTask
from autosac.configurations.evaluating.study import Study
from autosac.configurations.evaluating.workers import WorkerLost, Workers
from autosac.configurations.found.job_files import job_path, written_job
from autosac.configurations.found.results import ConfigurationRow, Counts, SearchResult, least_of_kinds, told_as
from autosac.configurations.running.engine import Bound, PendingWork, SearchState, Value, best_first
from autosac.configurations.running.known_sheets import KnownSheets
from autosac.configurations.running.order import REACHED, preferred, put_off
from autosac.configurations.running.refusals import Refusals, hopeful
from autosac.configurations.running.sampling import Sampler, sampled
from autosac.configurations.running.too_large import TooLarge
from autosac.configurations.space.layout import (
    USUAL_STAGES,
    Layout,
    arguments_of,
    checkpointing_of,
    is_legal,
    knobs_of,
    layout_of,
    legal,
    settings_of,
    why_none,
)
from autosac.configurations.space.wanted import Own, Wanted
from autosac.errors import AutosacError, CaptureError, UsageError
from autosac.jobs.titan import TitanJob

_TRIES = 3
MOST_LAYOUTS = 50_000


class TitanSearch:
    """The steps of a search (`running.engine.CandidateSteps`), and its result at any time."""

    def __init__(
        self, wanted: Wanted, own: Own, workers: Workers, study: Study, progress: Callable[[str], None]
    ) -> None:
        self._wanted, self._own, self._study = wanted, own, study
        self.workers = workers
        self._progress = progress
        self._machines = Machines(wanted)
        self.bounds = LayoutBounds(wanted, own, self._machines)
        self._tries: dict[Any, int] = {}
        self._lost: dict[str, str] = {}  # why an evaluation failed, by its key; not kept in the study
        self._sheets = KnownSheets(partial(self._machines.key, "sheet"), self._answer, self._lost)
        self._failed: dict[Layout, float] = {}  # bounds of layouts of which nothing more is known
        self._rows: dict[Layout, list[ConfigurationRow]] = {}
        self._plans: dict[str, str] = {}
        self._refused: dict[Layout, str] = {}
        self._refusals = Refusals()
        self._as_it_runs: set[str] = set()  # refusals that say the same without AutoSAC
        self._induced: set[Layout] = set()  # refused as others were, without being tried
        self._too_large = TooLarge(self.stage_layers)
        self._walked: set[Layout] = set()  # whose bounds know the paths through their schedules
        self._derived: set[Layout] = set()
        self._confirmed_plans: set[Layout] = set()
        self._evaluated: set[str] = set()
        self._reused = 0
        self._asked = 0
        self._begin = time.monotonic()
        self._ended = False
        self.sampled = False  # whether there are too many layouts to list: `layouts` are those proposed so far
        self.layouts = self._legal()
        self.outcome: SearchState[Layout] = SearchState()

    def _legal(self) -> list[Layout]:
        found: list[Layout] = []
        for offer in self._wanted.request.offers:
            per_node, own = self._machines.per_node(offer.gpu), self._own
            rest = (offer.world_size, per_node, own.global_batch, own.facts, own.compiled)
            some = legal(self._wanted.space, offer.gpu, *rest)
            found += itertools.islice(some, MOST_LAYOUTS + 1)
            if len(found) > MOST_LAYOUTS:
                self.sampled = True
                return found[:1]
        if not found:
            sizes = ", ".join(f"{offer.world_size} x {offer.gpu}" for offer in self._wanted.request.offers)
            raise UsageError(
                f"no configuration of the space is legal on {sizes}: {self._why_none()} (--show-space prints the space)"
            )
        return sorted(found, key=preferred)

    def _why_none(self) -> str:
        offer, own = self._wanted.request.offers[0], self._own
        rest = (self._machines.per_node(offer.gpu), own.global_batch, own.facts, own.compiled)
        return why_none(self._wanted.space, offer.world_size, *rest)

    def run(self, on_change: Callable[[SearchState[Layout]], None] = lambda _: None) -> SearchResult:
        """Search to the end. Interrupted, `result` has what was found. `on_change` gets what has been found so far."""

        def changed(outcome: SearchState[Layout], least: float) -> None:
            self._tell(outcome, least)
            on_change(outcome)

        def work_out(layouts: Sequence[Layout]) -> Mapping[Layout, float]:
            bounds = self.first_bounds()
            best_first(
                [(layout, bounds[layout]) for layout in layouts],
                self,
                self.workers.submit,
                at_once=self.workers.count,
                gap=self._wanted.request.gap,
                outcome=self.outcome,
                on_change=changed,
                priority=self._priority,
            )
            found = {**self.outcome.pruned, **self.outcome.values}
            return {layout: max(found[layout], self.outcome.best) for layout in layouts}

        def propose(layouts: Sequence[Layout]) -> Mapping[Layout, float]:
            self.layouts += [layout for layout in layouts if layout not in self.layouts]
            found = work_out(layouts)
            self.outcome.proven = False
            return found

        if self.sampled:
            sampled(self._sampler(), propose)
        else:
            work_out(self.layouts)
        self._ended = True
        return self.result()

    def _priority(self, layout: Layout, bound: float) -> float:
        likely = self.sheet_bound(layout, REACHED * self._machines.room_bytes(layout), paths=False)
        return put_off(layout, bound, bound if likely is None else likely)

    def _sampler(self) -> Sampler[Layout]:
        own, space = self._own, self._wanted.space
        knobs: dict[str, dict[Any, None]] = {"gpu": dict.fromkeys(self._machines.offers)}
        for gpu, offer in self._machines.offers.items():
            rest = (offer.world_size, self._machines.per_node(gpu), own.global_batch, own.facts, own.compiled)
            for name, values in knobs_of(space, *rest).items():
                knobs.setdefault(name, {}).update(dict.fromkeys(values))

        def make(choice: Mapping[str, Any]) -> Layout | None:
            offer = self._machines.offers[choice["gpu"]]
            rest = {name: value for name, value in choice.items() if name != "gpu"}
            layout = layout_of(rest, offer.gpu, offer.world_size, own.global_batch)
            return layout if layout is not None and is_legal(layout, space, own.facts) else None

        return Sampler({name: tuple(values) for name, values in knobs.items()}, make)

    # ---- jobs ----

    def stage_layers(self, layout: Layout) -> tuple[int, ...]:
        """How many layers each pipeline stage has; if balanced, as far as its sheet is known."""
        return split_of(layout, self._shape(layout))

    def settings(self, layout: Layout) -> dict[str, Any]:
        """TorchTitan's settings of a layout."""
        own = layout.pipeline == 1 or (layout.split == "torchtitan" and layout.stages == USUAL_STAGES)
        split = None if own else self.stage_layers(layout)
        return settings_of(layout, self._own.converters, split, python=self._own.python is not None)

    def _job(self, layout: Layout) -> TitanJob:
        settings = self.settings(layout)
        parts = settings.pop("parallelism.module_fqns_per_model_part", None)
        job = self._wanted.job
        file = job.config_file
        if parts is not None:  # which no argument can say
            text = written_job(file, (), {"parallelism.module_fqns_per_model_part": parts})
            file = str(job_path(self._study.folder, "-".join(str(len(part)) for part in parts), text))
        return replace(
            job,
            config_file=file,
            target=self._machines.target(layout),
            overrides=(*job.overrides, *arguments_of(settings)),
            world_size=layout.world_size,
        )

    # ---- bounds ----

    def first_bounds(self) -> dict[Layout, float]:
        """By the parameters' shapes, which the first sheet tells; 0 if there is none, but layouts that run without."""

        def by(sheet: Sheet) -> dict[Layout, float]:
            return {layout: self.bounds.first(layout, sheet) for layout in self.layouts}

        reasons: list[str] = []
        for served in hopeful(map(sheet_layout, self.layouts), reasons):
            if self._refusals.reason(served) is not None:
                continue
            self._progress("capturing a few layers")
            self.ask_sheet(served)
            if (sheet := self._sheets.known(served)) is not None:
                return by(sheet)
            reasons.append(str(self.sheet_of(served)))
            if self._machines.key("sheet", served) not in self._lost:
                self._refusals.refused(served, reasons[-1])
        without: list[str] = []
        for layout in hopeful((layout for layout in self.layouts if not runs_as_its_sheet(layout)), without):
            self.ask_sheet(layout)
            if (sheet := self._sheets.known(layout)) is not None:
                return by(sheet)
            work = PendingWork(self._machines.key("layout", layout), self.task(layout, 0.0))
            answer = self._ask(work) or {"refused": ""}
            if "refused" not in answer:
                return dict.fromkeys(self.layouts, 0.0)
            without.append(answer["refused"])
        raise CaptureError(f"no layout of the space can be captured: {reasons[0]}")

    def sheet_bound(self, layout: Layout, room_bytes: float | None = None, *, paths: bool = True) -> float | None:
        """The second bound, in the objective's unit, within the search's budget or another one (of simulated allocations);
        None before its sheet is there. `paths`: see `bounds.bounds.bound_ms`.
        """
        sheet = self._sheets.known(layout)
        if sheet is None:
            return None
        return self.bounds.least(layout, self.bounds.shape(layout, sheet), room_bytes, paths=paths)

    def least_bytes(self, layout: Layout) -> float:
        """The memory bound by what is known."""
        return memory_bound_bytes(layout, self._shape(layout))

    def ask_sheet(self, layout: Layout) -> None:
        """Have the sheet that serves a layout captured, unless that has been done."""
        while self.sheet_of(layout) is None:
            self._ask(self._sheet_work(layout))

    def _ask(self, work: PendingWork) -> dict[str, Any] | None:
        """Have work done, unless that has been done; None if it fails."""
        key = str(work.key)
        while (answer := self._answer(key)) is None and key not in self._lost:
            future = self.workers.submit(work.content)
            while not future.done():
                wait([future], timeout=1.0)  # a little, so that signals are handled
            self.finished(work, future)
        return answer

    def _shape(self, layout: Layout) -> ModelCosts:
        return self.bounds.shape(layout, self._sheets.known(layout))

    def sheet_of(self, layout: Layout) -> Sheet | str | None:
        """See `KnownSheets.of`."""
        return self._sheets.of(layout)

    def _sheet_work(self, layout: Layout) -> PendingWork:
        served = self._sheets.served(layout)
        return PendingWork(self._machines.key("sheet", served), SheetTask(job=self._job(served)))

    def _answer(self, key: str) -> dict[str, Any] | None:
        answer = self._study.answer(key)
        if answer is not None and key not in self._evaluated:
            self._evaluated.add(key)
            self._reused += 1
        return answer

    # ---- steps ----

    def step(self, candidate: Layout, bound: float, best: float) -> Bound | Value | PendingWork:
        """See `running.engine.CandidateSteps`."""
        layout = candidate
        sheet = self.sheet_of(layout)
        reason = None if isinstance(sheet, Sheet) else self._refusals.reason(layout)
        if reason is not None:
            self._induced.add(layout)
            self._refused[layout] = reason
            return Value(math.inf)
        if sheet is None:
            return self._sheet_work(layout)
        if isinstance(sheet, str):
            if runs_as_its_sheet(layout) and self._machines.key("sheet", sheet_layout(layout)) not in self._lost:
                return self._refuse(layout, sheet, sheet_layout(layout))
        else:
            self._refusals.taken(self._sheets.served(layout))
            if not self.sampled and self.bounds.repeats(layout, sheet):
                return Bound(math.inf)
            for paths in (False, True)[: 1 + (layout.pipeline > 1 and layout not in self._walked)]:
                tight = self.bounds.least(layout, self.bounds.shape(layout, sheet), paths=paths)
                if tight > bound:
                    return Bound(tight)
            self._walked.add(layout)
        if self._too_large.rules_out(layout):
            return Bound(math.inf)
        if layout.without_plans != layout:
            plain = self._study.answer(self._machines.key("layout", layout.without_plans)) or {}
            tight = plain.get("at_least_ms", 0.0) * self._machines.weight(layout)  # which no plan shortens
            if tight > bound:
                return Bound(tight)
        key = self._machines.key("layout", layout)
        if key in self._lost:
            self._failed[layout] = bound
            return Value(math.inf)
        answer = self._answer(key)
        if answer is not None and "cut_off" in answer:
            tight = answer["at_least_ms"] * self._machines.weight(layout)
            if tight > bound:
                return Bound(tight)
            answer = None  # its bound is below the best after all
        if answer is None:
            return PendingWork(key, self.task(layout, self._limit_ms(layout, best)))
        if "refused" in answer:
            return self._refuse(layout, answer["refused"], layout)
        self._refusals.taken(layout)
        value = self.noted(layout, key, answer)
        planned = next((row for row in answer["rows"] if row["checkpointing"] == "autosac"), None)
        if value >= best or planned is None or planned["step_ms"] * self._machines.weight(layout) > value:
            return self.decided(layout, answer, value, best)
        return self._confirmed(layout, answer, value, best)

    def _limit_ms(self, layout: Layout, best: float) -> float:
        """The longest step that is better than the best."""
        return best * (1 - self._wanted.request.gap) / self._machines.weight(layout)

    def decided(self, layout: Layout, answer: Mapping[str, Any], value: float, best: float) -> Value | PendingWork:
        """The value, unless what the answer left out can be better after all: than a plan whose capture is slower than was
        derived, or than the best of another space, which asked.
        """
        limit_ms = min(self._limit_ms(layout, best), value / self._machines.weight(layout))
        if any(ms < limit_ms for ms in answer.get("skipped", {}).values()):
            task = replace(self.task(layout, self._limit_ms(layout, best)), least_ms={})
            return PendingWork(self._machines.key("layout", layout), task)
        return Value(value)

    def _refuse(self, layout: Layout, reason: str, tried: Layout) -> Value:
        self._refusals.refused(tried, reason)
        self._refused[layout] = reason
        return Value(math.inf)

    def _confirmed(self, layout: Layout, answer: Mapping[str, Any], value: float, best: float) -> Value | PendingWork:
        """The value of a layout that becomes the best by its plan, as soon as the step has been captured under it. Without
        the plan, if that cannot be done.
        """
        key = self._machines.key("plan", layout)
        captured = self._answer(key) or {}
        if "refused" in captured:
            self._lost[key] = f"its step cannot be captured under the plan: {captured['refused']}"
        if key in self._lost:
            self._failed[layout] = value
        elif captured:
            self._confirmed_plans.add(layout)
        else:
            task = PlanTask(
                job=self._job(layout),
                goal=self._machines.goal(layout),
                plan=answer["plan"],
                pipeline=layout.pipeline > 1,
                confidence=self._wanted.request.confidence,
                own_full=self._wanted.space.plans_own_full,
            )
            return PendingWork(key, task)
        rows = [row for row in answer["rows"] if row["checkpointing"] != "autosac"]
        rows += [captured["row"]] if "row" in captured else []
        plan = captured.get("plan", answer["plan"])
        value = self.noted(layout, self._machines.key("layout", layout), {**answer, "rows": rows, "plan": plan})
        return self.decided(layout, answer, value, best)

    def task(self, layout: Layout, cutoff_ms: float) -> LayoutTask:
        """The evaluation of a layout; a step that takes `cutoff_ms` without checkpointing is not looked at further."""
        return LayoutTask(
            job=self._job(layout),
            goal=self._machines.goal(layout),
            own_full=self._wanted.space.plans_own_full,
            checkpointing=checkpointing_of(layout, self._wanted.space),
            cutoff_ms=min(cutoff_ms, 1e300),
            confidence=self._wanted.request.confidence,
            least_ms=self.least_ms(layout),
            refusals=frozenset(self._as_it_runs),
        )

    def least_ms(self, layout: Layout) -> dict[str, float]:
        """Lower bounds of the step under full and selective checkpointing, as far as a sheet tells them."""
        sheet = self._sheets.known(layout)
        if sheet is None or layout.compile or layout.activation_offload:
            return {}
        each = {"full": sheet.full_ms, "selective-op": sheet.selective_ms}
        return {name: recomputing_bound_ms(layout, self._shape(layout), ms) for name, ms in each.items()}

    def noted(self, layout: Layout, key: str, answer: Mapping[str, Any]) -> float:
        """Take an answer into the rows; the best score of what fits."""
        weight = self._machines.weight(layout)
        rows = [
            ConfigurationRow(
                layout=told_as(layout, answer.get("plan") if row["checkpointing"] == "autosac" else None),
                measured=(measured := PredictedStep(**row)),
                score=measured.step_ms * weight,
                offer=self._machines.offers[layout.gpu],
                plan_key=key if measured.checkpointing == "autosac" else "",
            )
            for row in answer["rows"]
            if row["checkpointing"] in self._wanted.space.checkpointing or row["fits"]
        ]
        self._rows[layout] = rows
        if "plan" in answer:
            self._plans[key] = answer["plan"]
            self._derived.add(layout)
        fitting = [row.score for row in rows if row.measured.fits]
        if not fitting and not {"skipped", "unplanned"} & answer.keys() and layout not in self._failed:
            self._too_large.note(layout)
        return min(fitting, default=math.inf)

    def finished(self, work: PendingWork, future: Future[Any]) -> None:
        """See `running.engine.CandidateSteps`."""
        key = str(work.key)
        try:
            answer = future.result()
        except WorkerLost as e:
            self._tries[key] = self._tries.get(key, 0) + 1
            if self._tries[key] < _TRIES:
                return  # it is asked for again
            self._lost[key] = f"the process that evaluated it ended {_TRIES} times: {e}"
            return
        except Exception as e:  # an evaluation that fails is reported with its reason, and is not the end
            self._lost[key] = str(e) if isinstance(e, AutosacError) else f"{type(e).__name__}: {e}"
            return
        self._asked += 1
        self._evaluated.add(key)
        if "as_it_runs" in answer:
            self._as_it_runs.add(answer["refused"])
        rows = [*answer.get("rows", ()), *([answer["row"]] if "row" in answer else [])]
        fitting = [row["step_ms"] for row in rows if row["fits"]]
        knobs = dict(word.split("=", 1) for word in key.split()[1:] if "=" in word)
        self._study.record(key, answer, knobs, min(fitting, default=None))

    # ---- what is known ----

    def _tell(self, outcome: SearchState[Layout], least: float) -> None:
        is_cost = self._wanted.request.objective == "cost-per-token"  # in nobody's currency
        figure = "{:.3g} a step" if is_cost else "{:,.1f} ms"
        best = f"; best {figure.format(outcome.best)}" if math.isfinite(outcome.best) else ""
        left = f"; the others at least {figure.format(least)}" if math.isfinite(least) else ""
        self._progress(f"{len(outcome.values)} of {len(self.layouts)} layouts evaluated{best}{left}")

    def result(self) -> SearchResult:
        """What is known now."""
        best_of: dict[Any, ConfigurationRow] = {}
        rows = itertools.chain(*self._rows.values())
        for row in sorted(rows, key=lambda row: (row.score, preferred(row.layout))):
            best_of.setdefault((row.layout, row.measured.checkpointing), row)
        refused = dict(self._refused)
        evaluated = [layout for layout in self.outcome.values if layout not in refused and layout not in self._failed]
        gap = self._wanted.request.gap
        return SearchResult(
            rows=tuple(best_of.values()),
            counts=Counts(
                configurations=len(self.layouts) * len(self._wanted.space.checkpointing),
                legal=len(self.layouts),
                bounded=len(self.outcome.pruned),
                evaluated=len(evaluated),
                derived=len(self._derived),
                confirmed=len(self._confirmed_plans),
                captured=self._asked,
                sheets=self._sheets.count(),
                refused=len(refused),
                induced=len(self._induced),
                failed=len(self._failed),
                reused=self._reused,
            ),
            objective=self._wanted.request.objective,
            gap=gap,
            proven=self.outcome.proven and not any(self.outcome.is_open(bound, gap) for bound in self._failed.values()),
            refused=refused,
            failed={layout: self._why_lost(layout) for layout in self._failed},
            plans=self._plans,
            settings={row.layout: self.settings(row.layout) for row in best_of.values()},
            budgets_bytes=self._machines.budgets_bytes(),
            closest=self.outcome.closest,
            kinds=least_of_kinds(self.outcome.pruned),
            seconds=time.monotonic() - self._begin,
            offers=tuple(self._wanted.request.offers),
            sampled=self.sampled and self._ended,
            python=self._own.python,
            confidence=self._wanted.request.confidence,
        )

    def _why_lost(self, layout: Layout) -> str:
        return next(
            self._lost[key] for kind in ("layout", "plan") if (key := self._machines.key(kind, layout)) in self._lost
        )
