"""Plans that nobody would make: of each layer a random part of what may be kept.

A budget may need no plan, or hardly any: where the backward is divided, full checkpointing holds more memory than none, and
what is recomputed runs twice. Such plans make the schedule recompute all the same.
"""

from __future__ import annotations

import random
from pathlib import Path

from autosac.capture.process.server import CaptureServer
from autosac.files.temporary import temporary_folder
from autosac.jobs.tasks import TitanJob, captures_of
from autosac.planning.closed_loop import Goal
from autosac.planning.planner import plan_of
from autosac.planning.stage_plans import merged
from autosac.planning.unit_policies import UnitPolicies, UnitPolicy
from autosac.plans import Plan, Unit

_LEFT_ALONE = 0.2  # of the modules
_KEPT = 0.4  # of what may be kept


def random_plan(titan: TitanJob, path: Path, seed: int, *, parts: bool) -> None:
    """Write a plan of a job's layers, or with `parts` of the modules in them."""
    chance = random.Random(seed)
    with temporary_folder() as folder, CaptureServer() as server:
        stages = [captures.observed() for captures in captures_of(titan, server, folder, ("none",))]
    plans: list[Plan] = []
    for stage in stages:
        depth = 2 if parts else 1
        units = [u for u in UnitPolicies(stage).units if u.name.startswith("layers.") and u.name.count(".") == depth]
        chosen = tuple(_keeping_some(unit, chance) for unit in units if chance.random() >= _LEFT_ALONE)
        plans.append(plan_of(stage, Goal(budget_bytes=1), chosen))
    merged(plans).save(path)


def _keeping_some(unit: UnitPolicy, chance: random.Random) -> Unit:
    items = enumerate(unit.sac.problem.items)
    return unit.keeping(
        tuple(i for i, item in items if item.forced or (item.forced is None and chance.random() < _KEPT))
    )
