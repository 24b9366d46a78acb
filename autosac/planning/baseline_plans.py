"""A baseline as a plan: the same modules checkpointed, the same operators recomputed, as far as plans decide on them.

What a job offers by itself (full checkpointing, TorchTitan's selective one) may be faster than what the search found: the
allocator reserves less for some plans than for others with the same active peak. `mirrored` reads from a baseline's trace what
it recomputes, so that it competes as a plan.

Where the host is the limit, no such plan is as fast as the job's own full checkpointing: it records every operator of its
modules, which that does not. So the plan may be that itself (`is_a_plan`), if it computes again only what plans may.
A job that is checkpointed by its own configuration computes more again already (routers of experts, and TorchTitan's count of
their tokens, which it corrects), and may go on with that.
"""

from __future__ import annotations

from collections.abc import Iterable

from autosac.derivation.steps import CapturedSteps, NotDerivableError, Recomputation, executions
from autosac.planning.unit_policies import UnitPolicies, UnitPolicy
from autosac.plans import Unit
from autosac.trace import Collective, Event, Op, Signature, Trace


def mirrored(policies: UnitPolicies, baseline: Trace) -> tuple[Unit, ...]:
    """The units that do what a baseline of the same job does; empty if it recomputes something that no plan may.

    Of a module that runs several times the first recomputation counts.
    """
    steps = CapturedSteps(baseline)
    try:
        blocks = {baseline.modules[block.module]: block for block in reversed(steps.recomputations)}
    except NotDerivableError:
        return ()
    units = {unit.name: unit for unit in policies.units}
    if not blocks.keys() <= units.keys() or _nest(blocks):
        return ()
    return tuple(
        unit.keeping(_kept(policies.base.trace, unit, steps, blocks[unit.name]))
        for unit in policies.units
        if unit.name in blocks
    )


def is_a_plan(policies: UnitPolicies, name: str, baseline: Trace) -> bool:
    """Whether a baseline may be the plan as it is: TorchTitan's own full checkpointing of an eager job, of modules that plans
    may checkpoint. Of what plans always keep, and of what is random, nothing may run again in it, unless the job is
    checkpointed by itself: then only nothing random.
    """
    info = baseline.info
    if name != "full" or info.checkpointing != name or info.compiled or not info.torchtitan_version:
        return False
    steps = CapturedSteps(baseline)
    try:
        blocks = [(baseline.modules[block.module], block) for block in steps.recomputations]
    except NotDerivableError:
        return False
    units = {unit.name: unit for unit in policies.units}
    only_random = info.own_checkpointing.startswith(("full", "selective"))
    return bool(blocks) and all(
        module in units
        and not _kept_always(units[module], only_random) & _rerun(policies.base.trace, units[module], steps, block)
        for module, block in blocks
    )


def _kept_always(unit: UnitPolicy, only_random: bool) -> set[int]:
    """The operators that every plan keeps and the random ones, or only these, by their position in the unit's forward. The
    units of a plan draw again, for each operator, what it drew; checkpointing of the job's own restores it once, if at all.
    """
    stats = unit.sac.stats
    random = {i for i, operator in enumerate(stats.operators) if operator.random}
    pairs = zip(unit.sac.problem.items, stats.groups, strict=True)
    kept = {member for item, group in pairs if item.forced is True for member in group.members}
    return random if only_random else kept | random


def _nest(names: Iterable[str]) -> bool:
    """Whether one module is within another."""
    found = set(names)
    return any(name.startswith(f"{other}.") for name in found for other in found)


def _kept(observed: Trace, unit: UnitPolicy, steps: CapturedSteps, block: Recomputation) -> tuple[int, ...]:
    """The items that a unit keeps: those of which no operator ran again, none if all did."""
    rerun = _rerun(observed, unit, steps, block)
    items, groups = unit.sac.problem.items, unit.sac.stats.groups
    # What costs no time is not kept either: that is also what recomputation does not come to because it stops early.
    kept = {
        i
        for i, (item, group) in enumerate(zip(items, groups, strict=True))
        if item.forced is None and item.recompute_ms > 0 and not rerun & set(group.members)
    }
    return tuple(sorted(kept | {i for i, item in enumerate(items) if item.forced is True})) if kept else ()


def _rerun(observed: Trace, unit: UnitPolicy, steps: CapturedSteps, block: Recomputation) -> set[int]:
    """The operators of a unit's forward that a baseline runs again, by their position.

    The recomputation's operators are the forward's in their order, less what was kept: each is the next that looks like it.
    """
    calls = executions(observed, unit.module)[0].calls
    ran = [
        (c, s) for c, call in enumerate(calls) for s in _operators(observed, observed.events[call.first : call.last])
    ]
    again = _operators(steps.trace, steps.rows[block.first : block.last])
    rerun: set[int] = set()
    at = 0
    for signature in again:
        found = next((i for i in range(at, len(ran)) if ran[i][1] == signature), None)
        if found is not None:  # else a hook's, of which policies see nothing
            rerun.add(ran[found][0])
            at = found + 1
    return rerun


def _operators(trace: Trace, events: tuple[Event, ...]) -> list[Signature]:
    """The signatures of what launches something."""
    signatures = [trace.signatures[e.signature] for e in events if type(e) is Op or type(e) is Collective]
    return [signature for signature in signatures if not signature.is_view]
