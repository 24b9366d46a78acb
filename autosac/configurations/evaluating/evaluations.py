"""Evaluations: what is worked out in other processes, as plain data that travels between them.

`SheetTask` captures a single layer of one microbatch (`bounds.sheets`). `LayoutTask` simulates a layout's step
without checkpointing and, where that does not fit, under every way of checkpointing that is asked for and could be the best,
AutoSAC's plan included: two to five captures, of a few layers where they repeat; the step under the plan is derived. A task
ends early where its step cannot beat what is known: no checkpointing shortens a step. `PlanTask` captures the step under a
plan, of all layers, and plans again on captures where that step does not fit, though it did as it was derived.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from autosac.capture.process.server import CaptureServer
from autosac.configurations.bounds.sheets import sheet_of
from autosac.errors import AutosacError, CaptureError, InfeasibleError, UsageError
from autosac.estimator.power import uncapped
from autosac.files.temporary import temporary_folder
from autosac.jobs.tasks import captures_of, plans_with_loss, simulate_in
from autosac.jobs.titan import TitanCaptures, TitanJob
from autosac.planning.closed_loop import Goal, Planned
from autosac.planning.confidence import Confidence, confidence_of
from autosac.plans import Plan
from autosac.simulation import Pipeline, Simulation, Target, simulation_of
from autosac.target import TargetGPU
from autosac.trace import Collective, Op

_SMALLEST = -2  # the cut with one period of layers


class Task(Protocol):
    """Work for another process. The answer is a document of JSON's types. `gpu`: what captures simulate, if there are any."""

    @property
    def gpu(self) -> TargetGPU | None: ...

    def run(self, server: CaptureServer) -> dict[str, Any]:
        """Do it; captures come from `server`. Failures of the job are part of the answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PredictedStep:
    """A configuration's predicted step. `parts`: milliseconds of the fullest rank, by `runtime_sim.breakdown.StepParts`, and
    of recomputation, a part of computation. `errors_ms`: by how much each cost model's standard error would lengthen
    the step through the operators that it priced, as far as nothing hides them.
    """

    checkpointing: str
    step_ms: float
    recompute_ms: float
    peak_reserved_bytes: int
    fits: bool
    tokens_per_second: float
    mfu: float
    parts: Mapping[str, float]
    errors_ms: Mapping[str, float]

    @staticmethod
    def of(name: str, stages: Sequence[Simulation], budget_bytes: int, kind: str) -> PredictedStep:
        """Of one rank of each pipeline stage."""
        joined = Pipeline(stages=tuple(stages)).joined() if len(stages) > 1 else stages
        peaks = [stage.peak_bytes(kind) for stage in joined]
        fullest = joined[int(np.argmax(peaks))]
        throughput, recompute_ms = fullest.throughput, fullest.recompute_ms
        return PredictedStep(
            checkpointing=name,
            step_ms=fullest.step_ms,
            recompute_ms=recompute_ms,
            peak_reserved_bytes=max(stage.peak_reserved_bytes for stage in joined),
            fits=max(peaks) <= budget_bytes,
            tokens_per_second=throughput.tokens_per_second,
            mfu=throughput.mfu,
            parts={**fullest.timeline.parts(fullest.stage)._asdict(), "recompute_ms": recompute_ms},
            errors_ms=_errors_ms(fullest),
        )


def _errors_ms(simulation: Simulation) -> dict[str, float]:
    pricing = simulation.pricing
    wrong = pricing.event_ms * pricing.event_rel_std * _exposed_shares(simulation)
    return {name: float(wrong[pricing.event_source == i].sum()) for i, name in enumerate(pricing.source)}


def _exposed_shares(simulation: Simulation) -> NDArray[np.float64]:
    """What of every event's time is the step's: of transfers and of copies beside computation only what it does not hide."""
    parts = simulation.timeline.parts(simulation.stage)
    events, event_ms = simulation.trace.events, simulation.pricing.event_ms
    transfers = np.array([type(event) is Collective for event in events])
    copies = np.array([type(event) is Op and event.stream != 0 for event in events])
    shares = np.ones(len(events))
    for chosen, exposed_ms in ((transfers, parts.exposed_communication_ms), (copies, parts.exposed_copy_ms)):
        shares[chosen] = min(1.0, exposed_ms / max(float(event_ms[chosen].sum()), 1e-9))
    return shares


@dataclass(frozen=True, kw_only=True)
class _JobTask:
    """Of a job. `own_full`: AutoSAC's plan may be TorchTitan's own full checkpointing, which is not compared by itself."""

    job: TitanJob
    own_full: bool = False

    def captures(self, server: CaptureServer, folder: Path) -> list[TitanCaptures]:
        """To plan with."""
        beside = ("none", "full") if self.own_full else ("none",)
        return captures_of(self.job, server, folder, ("none",), beside=beside)

    @property
    def gpu(self) -> TargetGPU:
        """See `Task`."""
        return self.job.target.gpu


@dataclass(frozen=True, kw_only=True)
class SheetTask(_JobTask):
    """A few layers of one microbatch. Answer: ``sheet``, or ``refused`` with the reason."""

    def run(self, server: CaptureServer) -> dict[str, Any]:
        """See `Task`."""
        request = self.job.request("none")
        try:
            try:
                trace = server.capture(replace(request, cut=_SMALLEST))
            except CaptureError:  # too few layers to leave any out, or the job cannot be built with so few
                trace = server.capture(request)
            return {"sheet": sheet_of(simulation_of(trace, _uncapped(self.job.target))).document()}
        except AutosacError as e:
            return {"refused": str(e)}


def _uncapped(target: Target) -> Target:
    """Without a power cap: what it leaves of the clock depends on the mix of a whole step, which a few layers do not tell."""
    return replace(target, hardware=uncapped(target.hardware))


@dataclass(frozen=True, kw_only=True)
class LayoutTask(_JobTask):
    """A layout under every way of checkpointing. AutoSAC's plan is not captured (`PlanTask`).

    `least_ms`: lower bounds of the step under full and selective checkpointing; what cannot beat the cutoff or the plan is
    left out (``skipped``, with its bound). Answer: ``rows`` (documents of `PredictedStep`) and ``at_least_ms``, the step
    without checkpointing, if that runs; ``plan``, the text of AutoSAC's plan; ``infeasible``, why none fits; ``unplanned``,
    why the job cannot be planned for, though it runs; ``cut_off``, the step that could not be beaten; or ``refused``, and
    ``as_it_runs`` if TorchTitan itself refuses the job in the same words. `refusals`: such words, after which nothing else
    is tried.
    """

    goal: Goal
    checkpointing: tuple[str, ...]
    cutoff_ms: float
    confidence: float | None = None
    least_ms: Mapping[str, float] = field(default_factory=dict)
    refusals: frozenset[str] = frozenset()

    def run(self, server: CaptureServer) -> dict[str, Any]:
        """See `Task`."""
        try:
            with temporary_folder() as folder:
                captures = self.captures(server, folder)
                return self._answer(captures, [stage.baseline("none") for stage in captures])
        except (CaptureError, UsageError) as e:
            return {"refused": str(e)} if str(e) in self.refusals else self._unplanned(server, str(e))

    def _unplanned(self, server: CaptureServer, why: str) -> dict[str, Any]:
        """As TorchTitan itself runs the job. Planning puts AutoSAC in the place of TorchTitan's checkpointing, which it may
        not have, or may refuse beside something else (experts that DualPipeV overlaps).
        """
        _, inner = _within(self.confidence, self.goal, self.job)
        rows: list[dict[str, Any]] = []
        said = set()
        for name in ("none", "full", "selective-op"):
            if name != "none" and name not in self.checkpointing:
                continue
            try:
                simulation, _ = simulate_in(server, self.job, checkpointing=name)
            except (CaptureError, UsageError) as e:
                said.add(str(e))
                continue
            stages = simulation.pipeline.stages if simulation.pipeline is not None else (simulation,)
            rows.append(asdict(PredictedStep.of(name, stages, inner, self.goal.budget_kind)))
        if not rows:
            return {"refused": why} | ({"as_it_runs": True} if said == {why} else {})
        asked = {*self.checkpointing, *(["none"] if "autosac" in self.checkpointing else [])}
        answer = {"rows": [row for row in rows if row["checkpointing"] in asked], "unplanned": why}
        first = rows[0]
        return answer | ({"at_least_ms": first["step_ms"]} if first["checkpointing"] == "none" else {})

    def _answer(self, captures: Sequence[TitanCaptures], stages: Sequence[Simulation]) -> dict[str, Any]:
        goal = replace(self.goal, confirm=False, changes=False)
        sure, inner = _within(self.confidence, goal, self.job)
        none = PredictedStep.of("none", stages, inner, goal.budget_kind)
        answer: dict[str, Any] = {"rows": [], "at_least_ms": none.step_ms}
        if {"none", "autosac"} & set(self.checkpointing):
            answer["rows"].append(asdict(none))
        if none.fits and answer["rows"]:
            return answer
        if none.step_ms >= self.cutoff_ms:
            return {**answer, "cut_off": self.cutoff_ms}
        if "autosac" in self.checkpointing:
            (planned,) = plans_with_loss(captures, goal, (goal.budget_bytes,), sure)
            answer |= self._planned(planned, answer["rows"], inner)
        best_ms = min((row["step_ms"] for row in answer["rows"] if row["fits"]), default=self.cutoff_ms)
        for name in ("full", "selective-op"):
            if name not in self.checkpointing:
                continue
            if self.least_ms.get(name, 0.0) >= min(best_ms, self.cutoff_ms):
                answer.setdefault("skipped", {})[name] = self.least_ms[name]
                continue
            for stage in captures:
                stage.start(name)
            if all(stage.working(name) for stage in captures):
                row = PredictedStep.of(name, [stage.baseline(name) for stage in captures], inner, goal.budget_kind)
                answer["rows"].append(asdict(row))
        return answer

    def _planned(self, planned: Planned | InfeasibleError, rows: list[Any], inner: int) -> dict[str, Any]:
        if isinstance(planned, InfeasibleError):
            return {"infeasible": str(planned)}
        rows.append(asdict(PredictedStep.of("autosac", _stages_of(planned), inner, self.goal.budget_kind)))
        return {"plan": planned.plan.to_bytes().decode(), "notes": list(planned.notes)}


@dataclass(frozen=True, kw_only=True)
class PlanTask(_JobTask):
    """A layout's step as captured under its plan, the text of which is `plan`. Answer: ``row``, and ``plan`` if it is another
    one after all; or ``refused``.
    """

    goal: Goal
    plan: str
    pipeline: bool = False
    confidence: float | None = None

    def run(self, server: CaptureServer) -> dict[str, Any]:
        """See `Task`."""
        sure, inner = _within(self.confidence, self.goal, self.job)
        plan = Plan.from_bytes(self.plan.encode())
        try:
            with temporary_folder() as folder:
                chunks, slices = plan.settings.loss_chunks, plan.settings.optimizer_slice_bytes
                job = replace(self.job, loss_chunks=chunks, optimizer_slice_bytes=slices)
                captures = [TitanCaptures(job, server, folder)]
                if self.pipeline:
                    captures = captures_of(job, server, folder, ("none",), beside=("none",))
                for stage in captures:
                    stage.begin(plan)
                stages = [stage.under(plan) for stage in captures]
                row = PredictedStep.of("autosac", stages, inner, self.goal.budget_kind)
                return {"row": asdict(row)} if row.fits else self._planned_again(server, folder, row, sure, inner)
        except (CaptureError, UsageError) as e:
            return {"refused": str(e)}

    def _planned_again(
        self, server: CaptureServer, folder: Path, row: PredictedStep, sure: Confidence | None, inner: int
    ) -> dict[str, Any]:
        """With a plan that fits as captured; the row of the one that does not, if there is none."""
        captures = self.captures(server, folder)
        (planned,) = plans_with_loss(captures, self.goal, (self.goal.budget_bytes,), sure)
        if isinstance(planned, InfeasibleError):
            return {"row": asdict(row)}
        again = PredictedStep.of("autosac", _stages_of(planned), inner, self.goal.budget_kind)
        return {"row": asdict(again), "plan": planned.plan.to_bytes().decode()}


def _stages_of(planned: Planned) -> Sequence[Simulation]:
    """The step under a plan, of every pipeline stage."""
    simulation = planned.simulation
    return simulation.pipeline.stages if simulation.pipeline is not None else (simulation,)


def _within(share: float | None, goal: Goal, job: TitanJob) -> tuple[Confidence | None, int]:
    """How sure a plan shall be, and what of the budget it may use then."""
    if share is None:
        return None, goal.budget_bytes
    sure = confidence_of(share, goal.budget_kind, job.target.allocator)
    return sure, sure.inner_bytes(goal.budget_bytes)


def checked(answer: Any) -> dict[str, Any]:
    """The answer, which has been through JSON: what a study keeps and what a process sends are the same."""
    found = json.loads(json.dumps(answer))
    if not isinstance(found, dict):
        raise CaptureError("an evaluation has no answer")
    return found
