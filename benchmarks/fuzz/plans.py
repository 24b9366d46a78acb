"""The plans of the fuzz: of the planner, legal ones with random keeps, and hostile ones.

Every plan is read back from its JSON.

Planner's plans are made for the shapes of a variant of a family, once, and kept as files in a folder (`Planner`).
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

import autosac
from autosac.plans import ANY_SIZE, Decision, MadeFor, Settings, Unit
from benchmarks.fuzz.family import ROWS, Family, Job
from benchmarks.fuzz.groups import groups_of
from benchmarks.fuzz.observing import Seen
from benchmarks.fuzz.snapshot import bare, clean

# Where between full and no checkpointing the budgets of the planner's plans lie.
FRACTIONS = (0.03, 0.5)
UNCLEAR = "unclear:"  # before the words of an error that is none of AutoSAC's
Calls = dict[str, list[Seen]]


def read_back(plan: autosac.Plan) -> autosac.Plan:
    """The plan as it is after `save` and `load`."""
    return autosac.Plan.from_bytes(plan.to_bytes())


# ---- the planner's -----------------------------------------------------------------------------------------


@dataclass
class Planner:
    """Plans of `autosac.plan`, kept in a folder by family, variant and budget. A refusal is kept like a plan."""

    folder: Path

    def plan(self, family: Family, variant: int, budget: int) -> autosac.Plan | str:
        """The plan for one of `FRACTIONS`; why there is none, in the words of the error that was raised."""
        made = self._made(family, variant, "none", lambda make_step: _planned(make_step, "64GiB"))
        if isinstance(made, str):
            return made
        none, full = (made.predictions[name].peak_active_bytes for name in ("none", "full") if name in made.predictions)
        if full >= none:
            return made
        bytes_ = full + round((none - full) * FRACTIONS[budget])
        goal = f"{bytes_ / 2**30:.12f}GiB"
        return self._made(family, variant, str(budget), lambda make_step: _planned(make_step, goal))

    def _made(self, family: Family, variant: int, key: str, make: Callable[[Any], autosac.Plan]) -> autosac.Plan | str:
        stem = self.folder / f"{family.name}-{variant}-{key}"
        plan_file, refusal = stem.with_suffix(".json"), stem.with_suffix(".txt")
        if plan_file.exists():
            return autosac.Plan.load(plan_file)
        if refusal.exists():
            return refusal.read_text()
        try:
            plan = make(_make_step(family, variant))
        except autosac.InfeasibleError as e:
            if key != "none":
                return self._made(family, variant, "none", make)
            refusal.write_text(f"InfeasibleError: {e}")
            return refusal.read_text()
        except autosac.AutosacError as e:
            refusal.write_text(f"{type(e).__name__}: {e}")
            return refusal.read_text()
        except BaseException as e:
            refusal.write_text(f"{UNCLEAR} {type(e).__name__}: {e}")
            raise
        plan.save(plan_file)
        return plan


def _planned(make_step: Any, budget: str) -> autosac.Plan:
    return autosac.plan(make_step, budget=budget, budget_kind="active", target="cpu")


def _make_step(family: Family, variant: int) -> Any:
    def make_step(device: torch.device) -> Any:
        with torch.device(device):
            torch.manual_seed(variant)
            job = family.build(random.Random(variant))
            model = job.transform(job.model) if family.plan_transformed else job.model

        def step() -> None:
            with torch.device(device):
                job.step(model, job.batch(ROWS))
                model.zero_grad()

        return model, step

    return make_step


# ---- legal and hostile -------------------------------------------------------------------------------------


def parameters_of(module: nn.Module) -> tuple[tuple[str, tuple[int, ...]], ...]:
    """Names and shapes of a module's parameters, as a plan has them."""
    return tuple((clean(name), tuple(p.shape)) for name, p in module.named_parameters(remove_duplicate=False))


def assemble(
    model: nn.Module, decisions: dict[str, tuple[Decision, ...]], settings: Settings, **made_for: Any
) -> autosac.Plan:
    """A plan for this model with these decisions of its units."""
    model = bare(model)
    known = {name for name, _ in model.named_modules(remove_duplicate=False)}
    units = tuple(
        Unit(
            fqn=name,
            discard_fraction=0.5,
            kept_bytes=0,
            recompute_ms=0.0,
            decisions=rows,
            parameters=parameters_of(model.get_submodule(name)) if name in known else (),
        )
        for name, rows in decisions.items()
    )
    about: dict[str, Any] = {
        "job_fingerprint": "",
        "model": type(model).__name__,
        "torch_version": torch.__version__,
        "torchtitan_version": "0.2.2",
        "gpu": "cpu",
        "world_size": 1,
        "budget_bytes": 0,
        "budget_kind": "active",
        "parameters": parameters_of(model),
    }
    return autosac.Plan(made_for=MadeFor(**{**about, **made_for}), units=units, settings=settings)


def decide(calls: list[Seen], keep: Collection[int], offload: Collection[int] = ()) -> tuple[Decision, ...]:
    """The decisions that keep these positions."""
    return tuple(
        Decision(
            op=c.op,
            occurrence=c.occurrence,
            keep=i in keep,
            outputs=c.outputs,
            memory_bytes=1,
            offload=i in keep and i in offload,
        )
        for i, c in enumerate(calls)
    )


def legal(job: Job, calls: Calls, rng: random.Random) -> autosac.Plan:
    """Some of the job's units, each with a random choice of its groups of operators, sometimes all or none of them."""
    names = [name for name in job.units if name in calls and rng.random() < 0.85] or list(job.units[:1])
    share, decisions = rng.choice((0.0, 0.2, 0.5, 0.5, 0.8, 1.0)), {}
    offloads = rng.random() < 0.1
    for name in names:
        rows = calls.get(name, [])
        keep = {i for group in groups_of(rows) if rng.random() < share for i in group}
        decisions[name] = decide(rows, keep, {i for i in keep if offloads and rng.random() < 0.5})
    return read_back(assemble(job.model, decisions, Settings(early_stop=rng.random() < 0.5)))


def hostile(job: Job, calls: Calls, rng: random.Random, foreign: list[Decision]) -> autosac.Plan:
    """A plan that no planner would make: random keeps, wrong rows, other units, any settings. Nearly all of them load.

    `foreign`: decisions of another model.
    """
    share = rng.choice((0.1, 0.3, 0.5, 0.7, 0.9, 1.0))
    offloads = rng.random() < 0.2
    decisions = {}
    for name in _units(job, rng, list(calls)):
        rows = calls.get(name, [])
        keep = {i for i in range(len(rows)) if rng.random() < share}
        made = list(decide(rows, keep, {i for i in keep if offloads and rng.random() < 0.5}))
        if rng.random() < 0.5:
            made = rng.choice((_drop, _surplus, _swap, _reshape, _any_size, _cast))(made, rng)
        if rng.random() < 0.1:
            made = list(foreign)
        decisions[name] = _renumbered(made) if rng.random() < 0.97 else tuple(made)  # loading refuses wrong occurrences
    settings = Settings(early_stop=rng.random() < 0.5, preserve_rng_state=rng.random() < 0.7)
    loose: dict[str, Any] = {"parameters": ()} if rng.random() < 0.5 else {}
    if rng.random() < 0.1:
        loose["pipeline_stages"] = 2
    plan = assemble(job.model, decisions, settings, **loose)
    if rng.random() < 0.3:
        plan = dataclasses.replace(plan, units=tuple(dataclasses.replace(unit, parameters=()) for unit in plan.units))
    return read_back(plan)


def for_compiler(plan: autosac.Plan, job: Job, rng: random.Random) -> autosac.Plan:
    """The plan without offloading, which compiled code refuses; sometimes some of its units, or all, get a memory budget."""
    kind, budgets = rng.random(), (0.0, 0.3, 0.6, 1.0)
    units = tuple(
        dataclasses.replace(unit, decisions=tuple(dataclasses.replace(row, offload=False) for row in unit.decisions))
        for unit in plan.units
    )
    settings = plan.settings
    if kind < 0.3 and job.is_compiled_by_units:  # a model that is compiled as a whole has one budget at most
        units = tuple(
            dataclasses.replace(unit, decisions=(), memory_budget=rng.choice(budgets)) if rng.random() < 0.7 else unit
            for unit in units
        )
    elif kind < 0.45:
        units, settings = (), dataclasses.replace(settings, memory_budget=rng.choice(budgets))
    return read_back(dataclasses.replace(plan, units=units, settings=settings))


def _units(job: Job, rng: random.Random, seen: list[str]) -> list[str]:
    """The job's units, or any modules of the model, or one that is not there; none inside another."""
    if rng.random() < 0.7:
        return [name for name in job.units if rng.random() < 0.8] or list(job.units[:1])
    names = [name for name, _ in bare(job.model).named_modules() if name]
    chosen: list[str] = []
    for name in rng.sample(names, min(len(names), rng.randint(1, 4))):
        if not any(name.startswith(other + ".") or other.startswith(name + ".") for other in chosen):
            chosen.append(name)
    if rng.random() < 0.1:
        chosen.append("not_there")
    return chosen


def _drop(rows: list[Decision], rng: random.Random) -> list[Decision]:
    return [row for row in rows if rng.random() < 0.8]


def _surplus(rows: list[Decision], rng: random.Random) -> list[Decision]:
    extra = (
        rng.choice(rows)
        if rows and rng.random() < 0.7
        else Decision(op="aten.foo.default", occurrence=0, keep=True, outputs=())
    )
    place = rng.randint(0, len(rows))
    return [*rows[:place], extra, *rows[place:]]


def _swap(rows: list[Decision], rng: random.Random) -> list[Decision]:
    if len(rows) > 1:
        i = rng.randrange(len(rows) - 1)
        rows[i], rows[i + 1] = rows[i + 1], rows[i]
    return rows


def _changed(rows: list[Decision], rng: random.Random, outputs: Callable[[Any], Any]) -> list[Decision]:
    if rows:
        i = rng.randrange(len(rows))
        rows[i] = dataclasses.replace(rows[i], outputs=tuple(outputs(out) for out in rows[i].outputs))
    return rows


def _reshape(rows: list[Decision], rng: random.Random) -> list[Decision]:
    return _changed(rows, rng, lambda out: ((*out[0], 3), out[1]))


def _any_size(rows: list[Decision], rng: random.Random) -> list[Decision]:
    return _changed(rows, rng, lambda out: ((ANY_SIZE,) * len(out[0]), out[1]))


def _cast(rows: list[Decision], rng: random.Random) -> list[Decision]:
    return _changed(rows, rng, lambda out: (out[0], rng.choice(("float64", "int64", "nonsense"))))


def _renumbered(rows: list[Decision]) -> tuple[Decision, ...]:
    """Occurrences as a file must have them."""
    counts: dict[str, int] = {}
    found = []
    for row in rows:
        number = counts.get(row.op, 0)
        counts[row.op] = number + 1
        found.append(dataclasses.replace(row, occurrence=number))
    return tuple(found)
