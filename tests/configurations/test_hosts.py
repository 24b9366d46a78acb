"""What hosts pay for a step at least, by a captured step of a few layers: against steps of all of them, written by hand."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autosac.configurations.bounds.chains import layer_of_name
from autosac.configurations.bounds.hosts import NO_HOST, HostTimes, host_bound_ms, hosts_of
from autosac.configurations.space.layout import Layout
from autosac.runtime_sim.host import host_costs
from autosac.simulation import Simulation, Target, simulation_of
from autosac.trace import Phase, Signature, TensorMeta, Trace
from traces import TraceBuilder

GATHER = 1  # a stream
NUMBERS = TensorMeta((4,), (1,), "bfloat16")
SHARDED = Layout(gpu="any", shard=4, global_batch=12)
TARGET = Target.of("h100-sxm-80gb", 4)
OPERATORS = st.lists(
    st.builds(
        Signature,
        name=st.sampled_from(["aten.mm.default", "aten.mul.Tensor", "triton.fused_0", "aten.view.default"]),
        inputs=st.just((NUMBERS,)),
        outputs=st.just((NUMBERS,)),
        arguments=st.just(()),
        is_random=st.just(False),
        mutates=st.just(()),
        is_view=st.booleans(),
        wrappers=st.integers(0, 2),
    ),
    max_size=4,
)


class Step(TraceBuilder):
    """A step of FSDP: `layers` are the operators of each, forward and backward; `ends` those of what stands around them."""

    def __init__(
        self,
        layers: Sequence[Sequence[Signature]],
        ends: Sequence[Signature],
        microbatches: int = 1,
        *,
        kept: bool = False,
    ) -> None:
        names = [f"layers.{i}" for i in range(len(layers))]
        super().__init__(("", "layers", *names, "head"), ())
        blocks = [*zip(names, layers, strict=True), ("head", ends)]
        for _ in range(microbatches):
            for self.phase, order in ((Phase.FORWARD, blocks), (Phase.BACKWARD, blocks[::-1])):
                for name, operators in order:
                    self.block(name, operators, gathers=self.phase is Phase.FORWARD or not kept)
        self.module = ""
        for self.phase, name, lists in ((Phase.OTHER, "_foreach_norm", 2), (Phase.OPTIMIZER, "_fused_adamw_", 5)):
            self.op(Signature(f"aten.{name}.default", (NUMBERS,) * (lists * (2 * len(layers) + 1)), ()))
        self.phase = Phase.OTHER

    def block(self, name: str, operators: Sequence[Signature], *, gathers: bool) -> None:
        """One module's part of a forward or backward."""
        self.enter(name)
        if gathers:
            self.on(GATHER, "fsdp.all_gather_copy_in.default", "aten.empty.memory_format")
            self.on(0, "fsdp.split_with_sizes_copy.default")
            self.op(Signature("aten.view.default", (NUMBERS,), (NUMBERS,), is_view=True))
        for operator in operators:
            self.op(operator)
        if self.phase is Phase.BACKWARD:
            self.on(0, "fsdp.chunk_cat.default")
        self.leave(name)
        self.module = name

    def on(self, stream: int, *names: str) -> None:
        """Operators without tensors on a stream."""
        self.stream = stream
        for name in names:
            self.op(Signature(name, (), ()))
        self.stream = 0

    def trace(self) -> Trace:
        """With two parameters in each layer and one outside, all in FSDP's units."""
        names = [name for name in self.modules if name.startswith("layers.")]
        parameters = [f"{name}.{part}.weight" for name in names for part in ("a", "b")]
        return self.build(parameter_shapes=dict.fromkeys([*parameters, "head.weight"], (4,)), fsdp_units=tuple(names))


def simulated(step: Step) -> Simulation:
    """On four H100s."""
    return simulation_of(step.trace(), TARGET)


def paid_ms(step: Step) -> float:
    """What the host pays for a step."""
    return float(host_costs(step.trace(), TARGET.host).sum())


def known(cut: Step, leading: int, total: int) -> HostTimes:
    """By a step of the leading layers and those behind them, which repeat."""
    simulation = simulated(cut)
    present = sorted({layer_of_name(name) for name in simulation.trace.info.parameter_shapes} - {-1})
    layer_of = [layer_of_name(name) for name in simulation.trace.modules]
    return hosts_of(simulation, layer_of, present, present[leading:], total)


@given(OPERATORS, OPERATORS, OPERATORS, st.integers(0, 2), st.integers(1, 4), st.integers(1, 3))
def test_no_step_is_issued_in_less(
    lead: list[Signature], layer: list[Signature], ends: list[Signature], leading: int, repeats: int, m: int
) -> None:
    """Whatever the layers do, the bound by one of those that repeat is what the host pays for all of them, where parameters
    are freed; and no more than that where they stay.
    """
    leads, total = [lead] * leading, leading + repeats
    times = known(Step([*leads, layer], ends), leading, total)
    layout = replace(SHARDED, global_batch=4 * m)
    whole = Step([*leads, *[layer] * repeats], ends, m)
    assert host_bound_ms(layout, times, total) == pytest.approx(paid_ms(whole), rel=1e-12)
    stays = Step([*leads, *[layer] * repeats], ends, m, kept=True)
    bound_ms = host_bound_ms(replace(layout, reshard="never"), times, total)
    views_ms = m * (total + 1) * 10 * TARGET.host.view_op_us / 1e3  # backwards' own are left out
    assert paid_ms(stays) - views_ms <= bound_ms <= paid_ms(stays) + 1e-12


def test_nothing_is_said_of_what_is_not_issued_so() -> None:
    """Pipelines, replicas without shards and replicas of experts; the optimizer counts if it is the captured one."""
    times = HostTimes(1.0, 2.0, 0.5, 1.5, 10.0, 100.0, sharded=True)
    assert host_bound_ms(SHARDED, times, 4) == 3 * 6 + 110
    assert host_bound_ms(replace(SHARDED, reshard="never"), times, 4) == 3 * 3.5 + 110
    assert host_bound_ms(replace(SHARDED, reshard="default"), times, 4) == 3 * 5.5 + 110  # the output's stay gathered
    assert host_bound_ms(replace(SHARDED, optimizer="foreach"), times, 4) == 3 * 6 + 10
    assert host_bound_ms(replace(SHARDED, cpu_offload=True), times, 4) == 3 * 6
    assert host_bound_ms(replace(SHARDED, replicate=2, shard=2), times, 4) == 3 * 6 + 110
    without = replace(SHARDED, shard=1, global_batch=3)
    others = (
        replace(SHARDED, pipeline=2),
        replace(SHARDED, replicate=2, shard=2, expert=2),
        replace(SHARDED, replicate=4, shard=1),
        without,
    )
    assert [host_bound_ms(layout, times, 4) for layout in others] == [0.0] * 4
    alone = times._replace(sharded=False)
    assert host_bound_ms(without, alone, 4) == host_bound_ms(replace(without, reshard="never"), alone, 4) == 3 * 6 + 110
    assert host_bound_ms(SHARDED, alone, 4) == host_bound_ms(replace(without, replicate=2), alone, 4) == 0.0


def test_where_the_host_is_the_device_nothing_is_said() -> None:
    """A CPU has no host beside it."""
    step = Step([[Signature("aten.mm.default", (), ())]], [])
    simulation = simulated(step)
    cpu = replace(simulation, target=replace(TARGET, hardware=replace(TARGET.hardware, device="cpu")))
    assert hosts_of(simulation, [-1] * 4, [0], [0], 1) != NO_HOST
    assert hosts_of(cpu, [-1] * 4, [0], [0], 1) == NO_HOST
