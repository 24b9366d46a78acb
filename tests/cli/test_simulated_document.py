"""The figures of a simulated step as JSON."""

from __future__ import annotations

from autosac.cli.simulated import simulation_document
from autosac.simulation import Target, simulation_of
from traces import TraceBuilder

MIB = 2**20


def test_peak_is_that_of_the_report() -> None:
    """A block of 40 MiB serves a tensor of 39.5 MiB and is not split: the peak that a plan's budget limits has all of it."""
    builder = TraceBuilder()
    first = builder.alloc(40 * MIB)
    builder.op("aten.relu.default", (first,), (first,))
    builder.free(first)
    second, third = builder.alloc(39 * MIB + MIB // 2), builder.alloc(4 * MIB)
    builder.op("aten.add.Tensor", (second, third), (second,))
    builder.free(second, third)
    simulation = simulation_of(builder.build(), Target.of("h100-sxm-80gb", 1))
    document = simulation_document(simulation)
    assert document["peak_active_bytes"] == simulation.peak_active_bytes == 44 * MIB
    assert sum(document["peak_by_category"].values()) == 43 * MIB + MIB // 2
