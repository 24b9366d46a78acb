"""A random climb from finished plans: whether changes that no solver proposes make the simulated step shorter.

    python -m benchmarks.climb [--job NAME ...] [--seconds 60] [--seed 0]

Each try takes the best plan so far and toggles what is kept of one to four items, each in one checkpointed module or in all of
its kind, exchanges what two modules keep, or stops checkpointing one. The step is simulated like that of any plan. A try that
fits the budget and is faster is the best plan from then on. The jobs are in no table of this documentation that anything was
chosen by; each one's budget lies in the middle between full and no checkpointing.
"""

from __future__ import annotations

import argparse
import random
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from autosac.capture.process.server import CaptureServer
from autosac.errors import AutosacError
from autosac.jobs.titan import TitanCaptures, TitanJob
from autosac.planning.closed_loop import Goal, Planner, derivation_for, make_plan
from autosac.planning.unit_policies import UnitPolicy
from autosac.plans import Plan, Unit
from autosac.simulation import Simulation

JOB = Path(__file__).parents[1] / "examples" / "llama3_8b.toml"
_QWEN = ("--model.name", "qwen3", "--model.flavor")
_BATCH = "--training.local_batch_size"
# Its embedding is its output layer too, which FSDP refuses.
_DDP = ("--parallelism.data_parallel_shard_degree", "1", "--parallelism.data_parallel_replicate_degree", "8")
JOBS = {
    "qwen3 1.7B, DDP, 8 sequences": (*_QWEN, "1.7B", _BATCH, "8", *_DDP),
    "qwen3 1.7B, DDP, 2 sequences": (*_QWEN, "1.7B", _BATCH, "2", *_DDP),
    "qwen3 8B": (*_QWEN, "8B"),
    "llama3 8B, TP 8": ("--parallelism.tensor_parallel_degree", "8", _BATCH, "4"),
    "deepseek_v3 debugmodel": ("--model.name", "deepseek_v3", "--model.flavor", "debugmodel", _BATCH, "64"),
}


class Climb(NamedTuple):
    """How far a plan can be climbed: its step and the best found (ms), and how many plans were tried."""

    plan_ms: float
    best_ms: float
    tried: int


def changed(planner: Planner, plan: Plan, draw: random.Random) -> Plan:
    """The plan with one random change."""
    units = list(plan.units)
    how = draw.random()
    if how < 0.1 and len(units) > 1:
        del units[draw.randrange(len(units))]
    elif how < 0.3 and len(units) > 1:
        a, b = draw.sample(range(len(units)), 2)
        if _policy(planner, units[a]).problem() == _policy(planner, units[b]).problem():
            units[a], units[b] = _as(units[a], units[b]), _as(units[b], units[a])
    else:
        for _ in range(draw.randint(1, 4)):
            _toggle(planner, units, draw)
    return replace(plan, units=tuple(units), reasons=())


def _toggle(planner: Planner, units: list[Unit], draw: random.Random) -> None:
    """One item of one module, or of all of its kind."""
    chosen = draw.randrange(len(units))
    problem = _policy(planner, units[chosen]).problem()
    if not problem.free():
        return
    item = draw.choice(problem.free())
    alike = [k for k, unit in enumerate(units) if _policy(planner, unit).problem() == problem]
    for k in alike if draw.random() < 0.3 else [chosen]:
        policy = _policy(planner, units[k])
        units[k] = policy.keeping(tuple(_kept(policy, units[k]) ^ {item}))


def _policy(planner: Planner, unit: Unit) -> UnitPolicy:
    return planner.policies.of_module(planner.base.trace.modules.index(unit.fqn))


def _kept(policy: UnitPolicy, unit: Unit) -> set[int]:
    """The items whose operators the unit keeps."""
    keep = {(decision.op, decision.occurrence) for decision in unit.decisions if decision.keep}
    names = [(operator.name, operator.occurrence) for operator in policy.sac.stats.operators]
    return {g for g, group in enumerate(policy.sac.stats.groups) if all(names[i] in keep for i in group.members)}


def _as(unit: Unit, other: Unit) -> Unit:
    return replace(other, fqn=unit.fqn, parameters=unit.parameters)


def climb(overrides: Sequence[str], seconds: float, draw: random.Random) -> Climb:
    """Plan a job and climb for so long."""
    job = TitanJob.of(str(JOB), gpu="h100-sxm-80gb", world_size=8, overrides=overrides)
    with tempfile.TemporaryDirectory(prefix="autosac-") as folder, CaptureServer() as server:
        captures = TitanCaptures(job, server, Path(folder), beside=("none", "full"))
        ends = captures.baselines()
        budget = (ends["none"].peak_reserved_bytes + ends["full"].peak_reserved_bytes) // 2
        goal = Goal(budget_bytes=budget, confirm=False)
        planned = make_plan(captures, goal)
        planner = Planner(captures.observed(), goal)
        derivation = derivation_for(captures, planner)
        best, best_ms = planned.plan, planned.simulation.step_ms
        end, tried = time.monotonic() + seconds, 0
        while time.monotonic() < end:
            candidate = changed(planner, best, draw)
            if candidate.units == best.units:
                continue
            tried += 1
            found: Simulation = derivation.under(candidate)
            if found.step_ms < best_ms and found.peak_reserved_bytes <= budget:
                best, best_ms = candidate, found.step_ms
        return Climb(planned.simulation.step_ms, best_ms, tried)


def main() -> None:
    """Print a row for each job."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--job", action="append", choices=sorted(JOBS), help="only this job (may be repeated)")
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    print("| job | plan | best of the climb | gain | plans tried |\n|---|--:|--:|--:|--:|", flush=True)
    for name in arguments.job or JOBS:
        try:
            plan_ms, best_ms, tried = climb(JOBS[name], arguments.seconds, random.Random(arguments.seed))
        except AutosacError as e:
            print(f"| {name} | {e} | | | |", flush=True)
            continue
        gain = plan_ms / best_ms - 1
        print(f"| {name} | {plan_ms:,.1f} ms | {best_ms:,.1f} ms | {gain:.2%} | {tried} |", flush=True)


if __name__ == "__main__":
    main()
