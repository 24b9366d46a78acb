"""Which operators are decided together: hand-made cases, and every allowed policy re-run on symbolic values."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autosac.estimator.sac_rules import OperatorGroup, operator_groups
from autosac.trace import Call


def call(op: str = "aten.op", *, created: Sequence[int] = (), reads: Sequence[int] = (), **flags: object) -> Call:
    """A call that covers no events; `writes` are among `reads`."""
    writes = tuple(flags.pop("writes", ()))  # type: ignore[call-overload]
    defaults = {"is_view": False, "is_random": False, "must_save": False} | flags
    return Call(
        op=op,
        occurrence=0,
        outputs=(),
        first=0,
        last=0,
        created=tuple(created),
        reads=(*reads, *(s for s in writes if s not in reads)),
        writes=writes,
        results=(),
        **defaults,  # type: ignore[arg-type]
    )


def test_independent_operators_are_groups_of_their_own() -> None:
    """Two matmuls and the view between them: the view is always recomputed."""
    calls = [call(created=[1], reads=[0]), call(is_view=True, reads=[1]), call(created=[2], reads=[1])]
    found = operator_groups(calls)
    assert found.groups == (OperatorGroup((0,), None), OperatorGroup((1,), False), OperatorGroup((2,), None))
    assert found.inplace_parent == (None, None, None)
    assert found.refusal is None


def test_an_allocation_is_no_view() -> None:
    """`empty` launches nothing but makes a storage: it is decided with the call that fills it."""
    calls = [call(is_view=True, created=[1]), call(reads=[0], writes=[1])]
    assert operator_groups(calls).groups == (OperatorGroup((0, 1), None),)


def test_an_inplace_operator_follows_its_parent() -> None:
    """relu_ on the result of a linear layer, then a reader: the first two are one group."""
    calls = [call(created=[1], reads=[0]), call("aten.relu_", writes=[1]), call(created=[2], reads=[1])]
    found = operator_groups(calls)
    assert found.groups == (OperatorGroup((0, 1), None), OperatorGroup((2,), None))
    assert found.inplace_parent == (0, 0, None)


def test_a_value_that_was_read_before_it_was_overwritten_cannot_be_kept() -> None:
    """Exp reads x, then x.add_(1): a kept x would come back as x + 1. A view in between is harmless."""
    calls = [call(created=[1], reads=[0]), call(created=[2], reads=[1]), call("aten.add_", writes=[1])]
    assert operator_groups(calls).groups == (OperatorGroup((0, 2), False), OperatorGroup((1,), None))
    calls[1] = call(is_view=True, reads=[1])
    assert operator_groups(calls).groups == (OperatorGroup((0, 2), None), OperatorGroup((1,), False))


def test_a_result_that_is_overwritten_after_the_forward_cannot_be_kept() -> None:
    """The module's output is relu_'d by what follows."""
    calls = [call(created=[1], reads=[0]), call(created=[2], reads=[1])]
    found = operator_groups(calls, written_later={2})
    assert found.groups == (OperatorGroup((0,), None), OperatorGroup((1,), False))
    assert found.refusal is None


def test_running_statistics_are_updated_once() -> None:
    """A batch norm writes to its buffer 9: always kept; so is what read the buffer before."""
    calls = [
        call(created=[1], reads=[0, 9]),
        call("aten.native_batch_norm", created=[2], reads=[1], writes=[9]),
        call(created=[3], reads=[9]),
    ]
    found = operator_groups(calls)
    assert [group.forced for group in found.groups] == [True, True, None]


def test_collectives_are_kept_with_the_buffer_that_they_fill() -> None:
    """Empty + all_gather into it: one group, always kept."""
    calls = [call(is_view=True, created=[1]), call("c10d.all_gather", reads=[0], writes=[1], must_save=True)]
    assert operator_groups(calls).groups == (OperatorGroup((0, 1), True),)


def test_random_operators_are_kept_or_decided_as_one() -> None:
    """Two dropouts: always kept by default, otherwise one free group; two where each draws again what it drew."""
    calls = [call(created=[1], reads=[0], is_random=True), call(created=[2]), call(created=[3], is_random=True)]
    assert [group.forced for group in operator_groups(calls).groups] == [True, None, True]
    found = operator_groups(calls, store_random=False)
    assert found.groups == (OperatorGroup((0, 2), None), OperatorGroup((1,), None))
    alone = operator_groups(calls, redraws=True)
    assert alone.groups == tuple(OperatorGroup((i,), None) for i in range(3))


def test_random_operators_that_cannot_be_kept_are_all_recomputed() -> None:
    """The first dropout's result is read and then overwritten: both dropouts run again, with the generator restored."""
    calls = [
        call(created=[1], reads=[0], is_random=True),
        call(created=[2], reads=[1]),
        call("aten.mul_", writes=[1]),
        call(created=[3], is_random=True),
    ]
    found = operator_groups(calls)
    assert found.groups == (OperatorGroup((0, 2, 3), False), OperatorGroup((1,), None))
    assert found.refusal is None


def test_calls_that_must_be_kept_elsewhere_are_no_contradiction() -> None:
    """As before, with a collective that has nothing to do with it: it is kept, and both dropouts run again."""
    calls = [
        call(created=[1], reads=[0], is_random=True),
        call(created=[2], reads=[1]),
        call("aten.mul_", writes=[1]),
        call("c10d.all_gather", created=[3], reads=[0], must_save=True),
        call(created=[4], is_random=True),
    ]
    found = operator_groups(calls)
    assert found.groups == (OperatorGroup((0, 2, 4), False), OperatorGroup((1,), None), OperatorGroup((3,), True))
    assert found.refusal is None


def test_what_reads_a_kept_result_before_it_is_overwritten_is_kept() -> None:
    """The scores of the chosen experts are divided by their sum in place: the sum is kept, and what copied it before."""
    calls = [
        call("aten.softmax", created=[1], reads=[0]),
        call("aten.topk", created=[2, 3], reads=[1], must_save=True),
        call("aten.sum", created=[4], reads=[2]),
        call("aten.clone", created=[5], reads=[2]),
        call("aten.div_", reads=[2, 4], writes=[2]),
        call("aten.mul", created=[6], reads=[2, 0]),
    ]
    found = operator_groups(calls)
    assert found.refusal is None
    assert [(group.members, group.forced) for group in found.groups] == [
        ((0,), None),
        ((1, 4), True),
        ((2,), True),
        ((3,), True),
        ((5,), None),
    ]


def test_readers_of_readers_are_kept() -> None:
    """Two collectives fill one buffer, it is read in between into another one, and that is overwritten in its turn."""
    calls = [
        call("aten.empty", is_view=True, created=[1]),
        call("c10d.a", reads=[0], writes=[1], must_save=True),
        call(created=[2], reads=[1]),
        call(created=[3], reads=[2]),
        call("aten.mul_", writes=[2]),
        call("c10d.b", reads=[0], writes=[1], must_save=True),
        call(created=[4], reads=[1]),
    ]
    found = operator_groups(calls)
    assert found.refusal is None
    assert [(group.members, group.forced) for group in found.groups] == [
        ((0, 1, 5), True),
        ((2, 4), True),
        ((3,), True),
        ((6,), None),
    ]


def test_only_what_contradicts_itself_is_named() -> None:
    """A free operator, a collective and a dropout of their own beside the contradiction are not in the refusal."""
    calls = [
        call("aten.mm", created=[1], reads=[0]),
        call("c10d.fine", created=[2], reads=[0], must_save=True),
        call("aten.dropout", created=[3], is_random=True),
        call("c10d.a", created=[4], reads=[0], must_save=True),
        call("aten.mul_", writes=[4]),
    ]
    refusal = operator_groups(calls, written_later={4}).refusal
    assert refusal == "c10d.a[0], aten.mul_[0] must be kept, but the result is overwritten later"


def test_an_input_that_is_overwritten_later_refuses_the_module() -> None:
    """Recomputation would start from another value."""
    refusal = operator_groups([call("aten.mm", created=[1], reads=[0])], written_later={0}).refusal
    assert refusal == "an input of aten.mm[0] is overwritten in place after the module's forward"


def test_statistics_that_a_later_microbatch_updates_are_harmless() -> None:
    """The batch norm of the next microbatch writes to buffer 9: this one's is kept, so that it does not read it again."""
    calls = [call("aten.native_batch_norm", created=[1], reads=[0], writes=[9]), call(created=[2], reads=[1])]
    found = operator_groups(calls, written_later={9})
    assert [group.forced for group in found.groups] == [True, None]
    assert found.refusal is None


# ---- every allowed policy, run on symbolic values -------------------------------------------------------------------


@st.composite
def programs(draw: st.DrawFn) -> tuple[list[Call], set[int]]:
    """Up to eight calls over two outside storages and those made so far; some are overwritten after the forward."""
    alive = [0, 1]
    calls = []
    for _ in range(draw(st.integers(1, 8))):
        reads = draw(st.lists(st.sampled_from(alive), max_size=2, unique=True))
        kind = draw(st.sampled_from(["new", "new", "inplace", "both", "view", "random"]))
        writes = [draw(st.sampled_from(alive))] if kind in ("inplace", "both") else []
        created = [len(alive)] if kind in ("new", "both", "random") else []
        calls.append(
            call(
                created=created,
                reads=reads,
                writes=writes,
                is_view=kind == "view",
                is_random=kind == "random",
                must_save=draw(st.integers(0, 9)) == 0,
            )
        )
        alive += created
    return calls, set(draw(st.lists(st.sampled_from(alive), max_size=1)))


def forward(calls: Sequence[Call]) -> tuple[dict[int, object], list[object]]:
    """Storages after the forward, and the value that each call computed: its inputs, and its draw if random."""
    memory: dict[int, object] = {0: "input 0", 1: "input 1"}
    values: list[object] = []
    draws = 0
    for i, c in enumerate(calls):
        value = (i, tuple(memory[s] for s in c.reads), draws if c.is_random else None)
        draws += c.is_random
        values.append(value)
        if not c.is_view:
            memory |= dict.fromkeys((*c.created, *c.writes), value)
    return memory, values


def check_recomputation(calls: Sequence[Call], kept: set[int], later: set[int], *, redraws: bool = False) -> None:
    """Run again what is not kept, on what the forward left behind, and compare with the forward call by call."""
    memory, values = forward(calls)
    memory |= dict.fromkeys(later, "overwritten")
    shared = {0, 1} | {s for i in kept for s in calls[i].created}
    again = {s: memory[s] for s in (0, 1)}
    draws = 0
    for i, c in enumerate(calls):
        if i in kept:
            again |= {s: memory[s] for s in c.created}
        elif not c.is_view:
            noted = sum(before.is_random for before in calls[:i])
            value = (i, tuple(again[s] for s in c.reads), (noted if redraws else draws) if c.is_random else None)
            draws += c.is_random
            assert value == values[i], f"call {i} computes something else"
            assert not shared.intersection(c.writes), f"call {i} writes to what the forward left behind"
            again |= dict.fromkeys((*c.created, *c.writes), value)


@settings(deadline=None, max_examples=400)
@given(programs(), st.booleans(), st.booleans(), st.data())
def test_every_allowed_policy_recomputes_the_forward(
    program: tuple[list[Call], set[int]], store_random: bool, redraws: bool, data: st.DataObject
) -> None:
    """Whatever is chosen for the free groups, each call that runs again sees and makes what it did in the forward."""
    calls, later = program
    found = operator_groups(calls, written_later=later, store_random=store_random, redraws=redraws)
    if found.refusal is not None:
        return
    assert sorted(i for group in found.groups for i in group.members) == list(range(len(calls)))
    kept: set[int] = set()
    for members, forced in found.groups:
        if forced or (forced is None and data.draw(st.booleans())):
            kept.update(members)
    check_recomputation(calls, kept, later, redraws=redraws)


def test_the_symbolic_run_notices_a_wrong_policy() -> None:
    """Keeping x although it was read and then overwritten fails the check above."""
    calls = [call(created=[2], reads=[0]), call(created=[3], reads=[2]), call(writes=[2])]
    check_recomputation(calls, set(), set())
    with pytest.raises(AssertionError, match="call 1 computes something else"):
        check_recomputation(calls, {0, 2}, set())
