"""A unit's decisions as the compiler meets its operators.

A plan is made of a step that runs without compilation. What the compiler traces may differ from that: operators that it takes
apart before a policy sees them (``one_hot``, ``interpolate``), casts of weights that autocast remembers outside of compiled
code and repeats inside. Decisions are by operator and occurrence, so one operator more would shift them to other tensors.

A capture of compiled units tells what was traced (`TraceInfo.traced`). `follows` says whether decisions are about that; where
they are not, `as_traced` carries them over: the two sequences are aligned by operators and their results
(``difflib.SequenceMatcher``), and what is in the compiler's sequence only is recomputed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from difflib import SequenceMatcher

from autosac.plans import ANY_SIZE, Decision, OutputMetadata, Unit
from autosac.trace import TracedOperators


def follows(decisions: Sequence[Decision], traced: TracedOperators) -> bool:
    """Whether every operator that was traced is one that is decided on, call by call, and none is missing."""
    planned = {(row.op, row.occurrence): row.outputs for row in decisions}
    rows = _numbered(traced)
    return planned.keys() == rows.keys() and all(_alike(planned[key], rows[key]) for key in rows)


def as_traced(unit: Unit, traced: TracedOperators) -> Unit:
    """The unit with decisions about what was traced, if that is something else than they are about; () is not known."""
    if not traced or not unit.decisions or follows(unit.decisions, traced):
        return unit
    is_dynamic = any(size == ANY_SIZE for row in unit.decisions for shape, _ in row.outputs for size in shape)
    is_dynamic |= any(size == ANY_SIZE for _, outputs in traced for shape, _ in outputs for size in shape)
    planned = [(row.op, _key(row.outputs, is_dynamic)) for row in unit.decisions]
    found = [(op, _key(outputs, is_dynamic)) for op, outputs in traced]
    partner: dict[int, Decision] = {}
    for block in SequenceMatcher(None, planned, found, autojunk=False).get_matching_blocks():
        partner.update({block.b + i: unit.decisions[block.a + i] for i in range(block.size)})
    rows = []
    for i, ((op, occurrence), outputs) in enumerate(_numbered(traced).items()):
        known = partner.get(i, Decision(op=op, occurrence=occurrence, keep=False, outputs=outputs))
        rows.append(replace(known, occurrence=occurrence, outputs=outputs))
    return replace(unit, decisions=tuple(rows))


def _numbered(traced: TracedOperators) -> dict[tuple[str, int], OutputMetadata]:
    """The results of each call, by operator and occurrence, in order."""
    seen: Counter[str] = Counter()
    found = {}
    for op, outputs in traced:
        found[op, seen[op]] = outputs
        seen[op] += 1
    return found


def _key(outputs: OutputMetadata, is_dynamic: bool) -> object:
    """What is compared: of results with dynamic sizes the dimensions only."""
    return tuple((len(shape) if is_dynamic else shape, dtype) for shape, dtype in outputs)


def _alike(a: OutputMetadata, b: OutputMetadata) -> bool:
    """Equal wherever neither has a dynamic size."""
    return len(a) == len(b) and all(
        dtype == other_dtype
        and len(shape) == len(other)
        and all(ANY_SIZE in (x, y) or x == y for x, y in zip(shape, other, strict=True))
        for (shape, dtype), (other, other_dtype) in zip(a, b, strict=True)
    )
