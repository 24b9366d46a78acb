"""SACEstimator on hand-made traces, and the tables of AUTO-SAC's Figure 5.3."""

from __future__ import annotations

import io
import math

import pytest
from rich.console import Console

from autosac.errors import UsageError
from autosac.estimator.sac_estimator import SACEstimator
from autosac.estimator.sac_rules import OperatorGroup
from autosac.estimator.sac_stats import SACModStats, SACOperator, tradeoff
from autosac.estimator.sac_tables import stats_table, tradeoff_rows, tradeoff_table
from autosac.solvers import greedy
from autosac.trace import (
    Alloc,
    Call,
    Event,
    Free,
    Label,
    ModuleEnter,
    ModuleExit,
    Op,
    Phase,
    Region,
    Signature,
    Storage,
    TensorMeta,
    Trace,
)
from traces import trace_of

META = TensorMeta((4,), (1,), "float32")
WAIT = "_c10d_functional.wait_tensor.default"
NAMES = ("aten.mm.default", "aten.gelu.default", "aten.add.Tensor", "aten.view.default", "aten.add_.Tensor", WAIT)


class Step:
    """Writes the trace of one module "block": its forward, then whatever the test adds."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.calls: list[Call] = []
        self.sizes: list[int] = []
        self.regions: list[Region] = []
        self.event_ms: list[float] = []

    def add(self, event: Event, ms: float = 0.0) -> None:
        """One event and its device time."""
        self.events.append(event)
        self.event_ms.append(ms)

    def storage(self, nbytes: int) -> int:
        """A new storage, allocated now."""
        self.sizes.append(nbytes)
        self.add(Alloc(len(self.sizes) - 1))
        return len(self.sizes) - 1

    def op(self, name: str, phase: Phase, reads: tuple[int, ...], outputs: tuple[int, ...], ms: float) -> None:
        """An operator that reads and makes these storages."""
        self.add(Op(NAMES.index(name), 0, 0, phase, 0, reads, outputs), ms)

    def call(self, name: str, reads: tuple[int, ...], ms: float, *nbytes: int, writes: tuple[int, ...] = ()) -> int:
        """An operator of the module's forward; returns the first storage that it makes (-1: none)."""
        first = len(self.events)
        made = tuple(self.storage(size) for size in nbytes)
        self.op(name, Phase.FORWARD, reads, made, ms)
        self.calls.append(
            Call(
                op=name,
                occurrence=sum(c.op == name for c in self.calls),
                outputs=(META,) * len(made),
                first=first,
                last=len(self.events),
                is_view=name == "aten.view.default",
                is_random=False,
                must_save=False,
                created=made,
                reads=reads,
                writes=writes,
                results=made,
            )
        )
        return made[0] if made else -1

    def end_forward(self, first: int, inputs: tuple[int, ...], outputs: tuple[int, ...]) -> None:
        """The region ends here."""
        self.add(ModuleExit(0, Phase.FORWARD))
        self.regions.append(Region(0, first, len(self.events), tuple(self.calls), inputs, outputs))
        self.calls = []

    def backward(self, reads: int, *frees: int) -> None:
        """A backward operator, and what it frees."""
        self.op("aten.mm.default", Phase.BACKWARD, (reads,), (), 1.0)
        for storage in frees:
            self.add(Free(storage))

    def trace(self) -> Trace:
        """All of it. Only add_ writes, to its first input."""
        return trace_of(
            self.events,
            signatures=(
                Signature(name, (META, META), (META,), mutates=(0,) if name == "aten.add_.Tensor" else ())
                for name in NAMES
            ),
            storages=(Storage(n, 0, Label.NONE, Phase.FORWARD, 0, 0, "") for n in self.sizes),
            modules=("block",),
            regions=self.regions,
        )

    def estimator(self, **options: object) -> SACEstimator:
        """The estimator of this step."""
        return SACEstimator(self.trace(), self.event_ms, **options)  # type: ignore[arg-type]


def mlp(step: Step, *, output_lives: bool = False) -> tuple[int, ...]:
    """Input x, hidden = mm(x), act = gelu(hidden), a view of it, out = mm(act); backward reads act, hidden, x in turn."""
    first = len(step.events)
    x = step.storage(1000)
    step.add(ModuleEnter(0, Phase.FORWARD))
    hidden = step.call("aten.mm.default", (x,), 2.0, 4000)
    act = step.call("aten.gelu.default", (hidden,), 0.5, 4096)
    step.call("aten.view.default", (act,), 0.0)
    out = step.call("aten.mm.default", (act,), 3.0, 1025)
    step.end_forward(first + 1, (x,), (out,))
    if not output_lives:
        step.add(Free(out))
    step.backward(act, act)
    step.backward(hidden, hidden)
    step.backward(x, x)
    if output_lives:
        step.add(Free(out))
    return x, hidden, act, out


def test_operators_have_their_events_time_and_rounded_memory() -> None:
    """Blocks of 512 bytes; the output dies before the backward, so keeping it would take its 1025 bytes, rounded."""
    step = Step()
    mlp(step)
    stats = step.estimator().stats(0)
    assert [(op.name, op.occurrence, op.runtime_ms, op.memory_bytes) for op in stats.operators] == [
        ("aten.mm.default", 0, 2.0, 4096),
        ("aten.gelu.default", 0, 0.5, 4096),
        ("aten.view.default", 0, 0.0, 0),
        ("aten.mm.default", 1, 3.0, 1536),
    ]
    assert stats.operators[0].outputs == (META,)
    assert (stats.implicit_bytes, stats.boundary_bytes, stats.refusal) == (8192, 0, None)
    assert (stats.runtime_ms, stats.memory_bytes) == (5.5, 9728)


def test_an_output_that_lives_anyway_takes_no_memory() -> None:
    """What follows holds the output until after the module's backward."""
    step = Step()
    mlp(step, output_lives=True)
    assert step.estimator().stats(0).operators[3].memory_bytes == 0


def test_an_input_that_would_die_is_a_boundary() -> None:
    """The input is freed before the backward: checkpointing has to hold its 1000 bytes, rounded."""
    step = Step()
    x = step.storage(1000)
    hidden = step.call("aten.mm.default", (x,), 2.0, 512)
    out = step.call("aten.gelu.default", (hidden,), 1.0, 512)
    step.end_forward(1, (x,), (out,))
    step.add(Free(x))
    step.backward(hidden, hidden, out)
    stats = step.estimator().stats(0)
    assert (stats.implicit_bytes, stats.boundary_bytes) == (512, 1024)


def test_host_time_counts_for_every_launch() -> None:
    """10 us on top of each operator but the view."""
    step = Step()
    mlp(step)
    runtimes = [op.runtime_ms for op in step.estimator(host_us_per_operator=10.0).stats(0).operators]
    assert runtimes == pytest.approx([2.01, 0.51, 0.0, 3.01])


def test_operators_that_the_backward_needs_nothing_of_cost_nothing() -> None:
    """The last matmul leads to the output only, so it is never run again; nor is an addition that nothing saves."""
    step = Step()
    mlp(step)
    runtimes = [op.runtime_ms for op in step.estimator(on_demand=True).stats(0).operators]
    assert runtimes == [2.0, 0.5, 0.0, 0.0]

    step = Step()
    x = step.storage(512)
    hidden = step.call("aten.mm.default", (x,), 2.0, 512)
    act = step.call("aten.gelu.default", (hidden,), 0.5, 512)
    out = step.call("aten.add.Tensor", (act, hidden), 0.25, 512)
    step.end_forward(1, (x,), (out,))
    step.backward(act, act)
    step.backward(hidden, hidden, x, out)
    runtimes = [op.runtime_ms for op in step.estimator(on_demand=True).stats(0).operators]
    assert runtimes == [2.0, 0.5, 0.0]


def test_what_overwrites_an_operand_after_its_last_reader_is_not_needed() -> None:
    """A gelu has read the product before something is added to that: its result needs the product, but not the addition."""
    step = Step()
    x = step.storage(512)
    hidden = step.call("aten.mm.default", (x,), 2.0, 512)
    act = step.call("aten.gelu.default", (hidden,), 0.5, 512)
    step.call("aten.add_.Tensor", (hidden, x), 0.25, writes=(hidden,))
    step.add(Free(hidden))
    step.end_forward(1, (x,), ())
    step.backward(act, act, x)
    runtimes = [op.runtime_ms for op in step.estimator(on_demand=True).stats(0).operators]
    assert runtimes == [2.0, 0.5, 0.0]


def test_waits_before_a_reader_are_needed() -> None:
    """Of two waits for a result, that before its reader runs again; one for an input leads to nothing that is needed."""
    step = Step()
    x = step.storage(512)
    gathered = step.call("aten.mm.default", (x,), 2.0, 512)
    step.call(WAIT, (gathered,), 0.25)
    step.call(WAIT, (x,), 0.125)
    act = step.call("aten.gelu.default", (gathered,), 0.5, 512)
    step.call(WAIT, (gathered,), 0.0625)
    step.add(Free(gathered))
    step.end_forward(1, (x,), ())
    step.backward(act, act, x)
    runtimes = [op.runtime_ms for op in step.estimator(on_demand=True).stats(0).operators]
    assert runtimes == [2.0, 0.25, 0.0, 0.5, 0.0]


def test_a_result_that_is_overwritten_outside_is_not_kept() -> None:
    """What follows the module adds to its output in place: the group of the last matmul is always recomputed."""
    step = Step()
    x = step.storage(512)
    hidden = step.call("aten.mm.default", (x,), 2.0, 512)
    out = step.call("aten.mm.default", (hidden,), 2.0, 512)
    step.end_forward(1, (x,), (out,))
    step.op("aten.add_.Tensor", Phase.FORWARD, (out,), (out,), 0.1)
    step.backward(hidden, hidden, out, x)
    stats = step.estimator().stats(0)
    assert stats.groups == (OperatorGroup((0,), None), OperatorGroup((1,), False))
    assert stats.refusal is None


def test_an_input_that_is_overwritten_outside_refuses_the_module() -> None:
    """Recomputation would start from x + y instead of x."""
    step = Step()
    x = step.storage(512)
    hidden = step.call("aten.mm.default", (x,), 2.0, 512)
    step.end_forward(1, (x,), ())
    step.op("aten.add_.Tensor", Phase.FORWARD, (x,), (x,), 0.1)
    step.backward(hidden, hidden, x)
    refusal = step.estimator().stats(0).refusal
    assert refusal == "an input of aten.mm.default[0] is overwritten in place after the module's forward"


def test_equal_executions_share_their_curve() -> None:
    """Two microbatches of one module: equal numbers, one object."""
    step = Step()
    mlp(step)
    mlp(step)
    first, second = step.estimator().modules().values()
    assert first.problem is second.problem and first.tradeoff is second.tradeoff
    assert first.segments() is second.segments()
    assert (first.stats.region, second.stats.region) == (0, 1)


def test_a_module_without_backward_has_no_statistics() -> None:
    """Under no_grad nothing is saved: the region is no candidate, and asking for it is an error."""
    step = Step()
    x = step.storage(512)
    out = step.call("aten.mm.default", (x,), 2.0, 512)
    step.end_forward(1, (x,), (out,))
    step.add(Free(out))
    assert step.estimator().modules() == {}
    with pytest.raises(UsageError, match="no backward uses what the forward of 'block' makes"):
        step.estimator().stats(0)


def test_wrong_prices_are_named() -> None:
    """As many times as events, and no negative host time."""
    step = Step()
    mlp(step)
    with pytest.raises(UsageError, match="1 times were given for the"):
        SACEstimator(step.trace(), [1.0])
    with pytest.raises(UsageError, match="must not be negative"):
        step.estimator(host_us_per_operator=-1.0)


def test_kept_operators_are_those_of_the_kept_groups() -> None:
    """Budget for the first matmul only: greedy discards gelu (cheap) and the last matmul's 1536 bytes are kept too."""
    step = Step()
    mlp(step)
    module = step.estimator().modules()[0]
    assert module.stats.kept_operators(greedy(module.problem, 6000)) == {0, 3}
    assert module.tradeoff.order.ranked == (1, 0, 3)
    assert module.tradeoff.order.recomputed == (2,)


def test_curve_counts_only_what_a_budget_decides() -> None:
    """1 ms is always recomputed, an item without memory (1 ms) is always kept, one without time is gone from the start."""
    operators = [(0, 1.0, True), (400, 0.0, False), (300, 1.0, False), (100, 1.0, False), (0, 1.0, False)]
    stats = SACModStats(
        module="m",
        region=0,
        operators=tuple(
            SACOperator(f"op{i}", 0, ms, memory, view, False, None, False, ())
            for i, (memory, ms, view) in enumerate(operators)
        ),
        groups=tuple(OperatorGroup((i,), False if view else None) for i, (_, _, view) in enumerate(operators)),
        implicit_bytes=0,
        boundary_bytes=0,
    )
    found = tradeoff(stats.local_problem())
    assert (found.discardable_bytes, found.stored_bytes, found.memory_bytes, found.runtime_ms) == (400, 0, 800, 4.0)
    assert found.curve() == ((0.0, 0.25), (0.75, 0.5), (1.0, 0.75))
    assert [point.group for point in found.points] == [-1, 1, 2, 3, 4]


# Figure 5.3 (a): index, name, ms, bytes of the operators that are not views; all others are views.
GPT2 = {
    0: ("native_layer_norm", 0.1042, 100925440),
    3: ("addmm", 3.9662, 301989888),
    12: ("_scaled_dot_product_efficient_attention", 1.7628, 102236672),
    17: ("addmm", 3.9662 / 3, 100663296),
    19: ("native_dropout", 0.117029, 125829120),
    20: ("add", 0.156, 100663296),
    21: ("native_layer_norm", 0.1042, 100925440),
    24: ("addmm", 3.9662 * 4 / 3, 402653184),
    26: ("gelu", 0.4161, 402653184),
    29: ("addmm", 3.9662 * 4 / 3, 100663296),
    31: ("native_dropout", 0.117029, 125829120),
    32: ("add", 0.156, 0),
}
# Figure 5.3 (b): operator, fraction discarded, fraction recomputed.
GPT2_TRADEOFF = [
    (19, 0.064, 0.0062),
    (31, 0.1281, 0.0125),
    (0, 0.1794, 0.018),
    (21, 0.2308, 0.0235),
    (26, 0.4357, 0.0457),
    (20, 0.4869, 0.054),
    (3, 0.6406, 0.265),
    (17, 0.6918, 0.3353),
    (24, 0.8967, 0.6166),
    (12, 0.9488, 0.7104),
    (29, 1.0, 0.9917),
    (32, 1.0, 1.0),
]


def gpt2_block() -> SACModStats:
    """The Transformer block of the figure (which does not group its random operators)."""
    operators = []
    for i in range(33):
        name, ms, memory = GPT2.get(i, ("view", 0.0, 0))
        operators.append(SACOperator(name, 0, ms, memory, i not in GPT2, False, None, False, (META,)))
    groups = tuple(OperatorGroup((i,), False if op.view_like else None) for i, op in enumerate(operators))
    return SACModStats(
        module="GPT.transformer.h.0",
        region=0,
        operators=tuple(operators),
        groups=groups,
        implicit_bytes=0,
        boundary_bytes=0,
    )


def test_figure_5_3() -> None:
    """The published trade-off table follows from the published statistics (one misprint there: 0.2380 for 0.2308)."""
    stats = gpt2_block()
    assert stats.memory_bytes == 1965031936
    assert stats.runtime_ms == pytest.approx(18.7983, abs=1e-3)
    rows = tradeoff_rows(stats, tradeoff(stats.local_problem()))
    assert len(rows) == 33
    assert [row[-1] for row in rows[:21]] == ["True"] * 21
    for row, (operator, discarded, recomputed) in zip(rows[21:], GPT2_TRADEOFF, strict=True):
        assert row[0] == f"({operator})"
        assert float(row[2]) == pytest.approx(discarded, abs=2e-4)
        assert float(row[4]) == pytest.approx(recomputed, abs=2e-4)
    assert rows[21][6] == "1.08e+12"  # the figure's 1.08e9 is per millisecond


def test_tables_print() -> None:
    """Both tables carry the module's name, its totals and a row per operator."""
    stats = gpt2_block()
    out = io.StringIO()
    console = Console(file=out, width=200)
    console.print(stats_table(stats))
    console.print(tradeoff_table(stats, tradeoff(stats.local_problem())))
    text = out.getvalue()
    assert "Module: GPT.transformer.h.0   total memory: 1965031936 B   total runtime: 18.79" in text
    assert text.count("_scaled_dot_product_efficient_attention") == 2
    assert text.count("native_dropout") == 4


def test_msps_of_an_operator_without_time_is_infinite() -> None:
    """It is discarded before anything that costs time; without memory and time, MSPS is zero."""
    stats = gpt2_block()
    free = stats.operators[1]._replace(view_like=False, memory_bytes=512)
    nothing = free._replace(memory_bytes=0)
    small = SACModStats(
        module="m",
        region=0,
        operators=(stats.operators[0], free, nothing),
        groups=tuple(OperatorGroup((i,), None) for i in range(3)),
        implicit_bytes=0,
        boundary_bytes=0,
    )
    order = tradeoff(small.local_problem()).order
    assert order.ranked == (1, 0, 2)
    assert (order.msps[0], order.msps[2]) == (math.inf, 0.0)
