"""Policies made by hand beside those that the planner proposes for a compiled layer.

    python -m benchmarks.compiled_adversary [--job "8B, 2 sequences"] [--sets 24] [--seed 1]

For one job of `benchmarks.compiled_plans` whose layers are equal: every policy that the planner may propose, and as many other
sets of products and attention that a layer keeps (of all that keep at least three, drawn with a seed), are measured as
compiled, on samples of a few layers. A plan mixes policies, so what counts is the lower convex hull of time over saved bytes.
Printed are all policies, and by how much of the step the hull with the others lies below that of the proposals, at the most.
"""

from __future__ import annotations

import argparse
import itertools
import random
import sys
from collections.abc import Iterator, Mapping, Sequence
from statistics import median_low

from autosac.capture.process.server import CaptureServer
from autosac.files.temporary import temporary_folder
from autosac.jobs.tasks import captures_of
from autosac.jobs.titan import TitanCaptures, TitanJob
from autosac.planning.closed_loop import Goal, planner_for
from autosac.planning.compiled_costs import unit_costs
from autosac.planning.compiled_policies import CompiledPolicy, UnitGroup, groups_of
from autosac.planning.planner import plan_of
from autosac.planning.unit_policies import UnitPolicy
from autosac.simulation import Simulation
from autosac.solvers.min_cut import lower_hull
from autosac.solvers.mix import Cost
from benchmarks.compiled_plans import EXAMPLES, JOBS

_KEPT = ("mm", "attention")
_AT_LEAST = 3
# Units of a sample that follow one policy: the first and the last of a model differ a little.
_TURNS = 3


def by_hand(unit: UnitPolicy, known: Sequence[CompiledPolicy]) -> Iterator[CompiledPolicy]:
    """Sets of products and attention that none of the known policies keeps."""
    stats, items = unit.sac.stats, unit.sac.problem.items
    first = [stats.operators[group.members[0]] for group in stats.groups]
    free = [i for i, item in enumerate(items) if item.forced is None and any(w in first[i].name for w in _KEPT)]
    seen = {policy.template.policy for policy in known if policy.template is not None}
    for count in range(_AT_LEAST, len(free) + 1):
        for kept in itertools.combinations(free, count):
            template = unit.keeping(kept)
            if template.policy not in seen:
                seen.add(template.policy)
                names = (f"{first[i].name.removeprefix('aten.')}[{first[i].occurrence}]" for i in kept)
                yield CompiledPolicy(name="keeps " + ", ".join(names), template=template)


def measured(
    captures: TitanCaptures, group: UnitGroup, policies: Sequence[CompiledPolicy], observed: Simulation, goal: Goal
) -> dict[CompiledPolicy, Cost]:
    """What each policy costs a layer, from samples in which layers take turns with a few policies."""
    found: dict[CompiledPolicy, Cost] = {}
    at_once = len(group.units) // _TURNS
    for begin in range(0, len(policies), at_once):
        turn = policies[begin : begin + at_once]
        pairs = list(zip(itertools.cycle(turn), group.units[: _TURNS * len(turn)], strict=False))
        units = tuple(made for policy, unit in pairs if (made := policy.of(unit)) is not None)
        simulation = captures.sample(plan_of(observed, goal, units), len(pairs))()
        costs = unit_costs(simulation, [unit.name for _, unit in pairs])
        for policy in turn:
            own = [costs[unit.name] for followed, unit in pairs if followed is policy]
            found[policy] = Cost(median_low(c.nbytes for c in own), median_low(c.ms for c in own))
    return found


def hull(costs: Sequence[Cost]) -> list[Cost]:
    """The lower convex hull of time over bytes, as far as time falls."""
    return [Cost(*corner) for corner in lower_hull(costs)]


def _slope(a: Cost, b: Cost) -> float:
    return (b.ms - a.ms) / (b.nbytes - a.nbytes)


def on(corners: Sequence[Cost], nbytes: int) -> float:
    """The hull's time at so many bytes."""
    for a, b in itertools.pairwise(corners):
        if a.nbytes <= nbytes <= b.nbytes:
            return a.ms + _slope(a, b) * (nbytes - a.nbytes)
    return corners[-1].ms


def table(
    proposed: Mapping[CompiledPolicy, Cost], others: Mapping[CompiledPolicy, Cost], step_ms: float, layers: int
) -> str:
    """All policies by bytes, and the largest difference between the hulls."""
    lines = ["    MiB      ms  policy"]
    for policy, cost in sorted({**proposed, **others}.items(), key=lambda row: row[1]):
        mark = "*" if policy in others else " "
        lines.append(f"{cost.nbytes / 2**20:7.0f} {cost.ms:7.3f} {mark}{policy.name}")
    without, both = hull(list(proposed.values())), hull([*proposed.values(), *others.values()])
    places = range(without[0].nbytes, without[-1].nbytes, 2**20)
    gain_ms = max((on(without, place) - on(both, place) for place in places), default=0.0)
    lines.append(
        f"{len(others)} sets by hand (*): at most {layers * gain_ms:.2f} ms of {step_ms:,.1f} ms "
        f"({layers * gain_ms / step_ms:.2%}) below mixes of the {len(proposed)} policies that are proposed"
    )
    return "\n".join(lines)


def main(argv: Sequence[str]) -> int:
    """Parse, run, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--job", default=JOBS[0].name, choices=[job.name for job in JOBS])
    parser.add_argument("--sets", type=int, default=24)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args(argv)
    row = next(job for job in JOBS if job.name == options.job)
    job = TitanJob.of(
        str(EXAMPLES / row.file),
        gpu="h100-sxm-80gb",
        world_size=row.world_size,
        overrides=("--compile.enable", *row.arguments.split()),
        progress=lambda text: print(text, file=sys.stderr),
    )
    goal = Goal(budget_bytes=job.target.hardware.usable_bytes)
    with CaptureServer(on_progress=job.progress) as server, temporary_folder() as folder:
        (captures,) = captures_of(job, server, folder, ("none",), beside=("none",))
        observed, none = captures.observed(), captures.baseline("none")
        (group,) = groups_of(planner_for(observed, none, goal).policies, none.trace)
        sets = list(by_hand(group.units[0], group.policies))
        sets = random.Random(options.seed).sample(sets, min(options.sets, len(sets)))
        proposed = measured(captures, group, group.policies, observed, goal)
        others = measured(captures, group, sets, observed, goal)
    print(table(proposed, others, none.step_ms, len(group.units)))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
