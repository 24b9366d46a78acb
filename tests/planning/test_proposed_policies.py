"""The policies that are proposed for a layer that is compiled as a whole, for units that are tables."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

from autosac.planning.compiled_policies import CompiledPolicy, all_or_nothing, proposed
from autosac.plans import Decision, Unit
from autosac.solvers import LocalItem, LocalProblem

# By name, bytes and time: the second product is dear to recompute, the third one large and cheap.
OPERATORS = {
    "aten.mm.default": (10, 5.0),
    "aten._scaled_dot_product_flash_attention.default": (10, 5.0),
    "aten.addmm.default": (10, 50.0),
    "aten.silu.default": (10, 5.0),
    "aten.bmm.default": (1000, 0.1),
    "aten.rand.default": (10, 5.0),
}
NAMES = tuple(OPERATORS)


class Table:
    """A unit of these operators, each decided by itself; the last one is always kept."""

    name, parameters = "layers.0", ()

    def __init__(self) -> None:
        last = len(NAMES) - 1
        items = tuple(LocalItem(*row, True if i == last else None) for i, row in enumerate(OPERATORS.values()))
        stats = SimpleNamespace(
            operators=[SimpleNamespace(name=name) for name in NAMES],
            groups=[SimpleNamespace(members=(i,)) for i in range(len(NAMES))],
        )
        self.sac = SimpleNamespace(problem=LocalProblem(items=items), stats=stats)

    def keeping(self, items: Sequence[int]) -> Unit:
        decisions = tuple(Decision(op=n, occurrence=0, keep=i in items, outputs=()) for i, n in enumerate(NAMES))
        return Unit(fqn=self.name, discard_fraction=0.0, kept_bytes=0, recompute_ms=0.0, decisions=decisions)

    def unit(self, solution: Any) -> Unit:
        return self.keeping(solution.kept)

    def recompute_all(self) -> Unit:
        return self.keeping(())


def kept(policy: CompiledPolicy | None) -> list[int]:
    """Which operators a policy keeps."""
    assert policy is not None and policy.template is not None
    return [i for i, row in enumerate(policy.template.decisions) if row.keep]


def test_every_second_product_is_kept() -> None:
    """The first and the third of three products, with attention and what is always kept, as TorchTitan does."""
    unit: Any = Table()
    found = {policy.name: policy for policy in proposed(unit, ())}
    assert kept(found["every second product"]) == [0, 1, 4, 5]
    assert kept(found["full"]) == [] and found["the compiler's own"].template is None


def test_no_two_policies_decide_alike() -> None:
    """The others are corners of the curve, from the least that can be kept to everything, and memory budgets."""
    unit: Any = Table()
    policies = proposed(unit, (0.25,))
    decided = [kept(policy) for policy in policies if policy.has_decisions]
    assert len({tuple(items) for items in decided}) == len(decided)
    assert [5] in decided and [0, 1, 2, 3, 4, 5] in decided
    assert [(p.name, p.template.memory_budget) for p in policies if p.template is not None and not p.has_decisions] == [
        ("memory_budget 0.25", 0.25)
    ]


def test_all_or_nothing() -> None:
    """A unit of which not all operators can be decided on is left to the compiler, or recomputes all that is in it."""
    unit: Any = Table()
    own, whole = all_or_nothing(unit)
    assert own.template is None and whole.name == "full"
    assert whole.template is not None and whole.template.decisions == () and whole.has_decisions
