"""The bounds of layouts from what is known of them: parameters' shapes, sheets, the job, and the machines."""

from __future__ import annotations

import math
from dataclasses import replace

from autosac.configurations.bounds.bounds import (
    any_split_bound_ms,
    bound_ms,
    split_of,
)
from autosac.configurations.bounds.machines import Machines
from autosac.configurations.bounds.shapes import LayerCosts, ModelCosts, costs_of_parameters
from autosac.configurations.bounds.sheets import Sheet
from autosac.configurations.space.layout import Layout
from autosac.configurations.space.splits import torchtitan_split
from autosac.configurations.space.wanted import Own, Wanted
from autosac.estimator.power import budget_of

_SAFE = 1 - 1e-9  # sums in another order


class LayoutBounds:
    """Of one search. Bounds are in the unit of its objective."""

    def __init__(self, wanted: Wanted, own: Own, machines: Machines) -> None:
        self._wanted, self._own, self._machines = wanted, own, machines

    def first(self, layout: Layout, known: Sheet) -> float:
        """By the parameters' shapes, which any sheet tells."""
        target = self._machines.target(layout)
        peak = target.hardware.peak_flops(self.fastest_arithmetic(layout))
        parameters = {name: tuple(shape) for name, shape in known.parameter_shapes}
        facts = self._own.facts._replace(layers=known.layers)
        shape = costs_of_parameters(parameters, facts, layout, peak, leading=known.leading)
        shape = shape if self._trains_everything(known) else shape.forward_only
        if layout.split == "balanced" and layout.pipeline > 1:  # how stages are balanced shows with the sheet
            return self._machines.weight(layout) * any_split_bound_ms(layout, shape) * _SAFE
        return self.least(layout, self._completed(layout, shape, known))

    def least(
        self, layout: Layout, shape: ModelCosts, room_bytes: float | None = None, *, paths: bool = False
    ) -> float:
        """Within the search's budget or another one. `paths`: see `bounds.bounds.bound_ms`."""
        room = self._machines.room_bytes(layout) if room_bytes is None else room_bytes
        return bound_ms(layout, shape, room, paths=paths) * self._machines.weight(layout) * _SAFE

    def shape(self, layout: Layout, sheet: Sheet | None) -> ModelCosts:
        """By a layout's sheet; without one, only ratios of times and what the job says are known."""
        if sheet is not None:
            return self._completed(layout, sheet.shape(pipeline=layout.pipeline > 1), sheet)
        return ModelCosts(
            layers=self._own.facts.layers,
            layer=LayerCosts(forward_ms=1.0, backward_ms=2.0),
            first=LayerCosts(),
            last=LayerCosts(),
            layer_parameters=0.0,
            outside_parameters=0.0,
            ends_less=self._own.facts.ends_less,
        )

    def repeats(self, layout: Layout, sheet: Sheet) -> bool:
        """Whether balanced stages are TorchTitan's own, which another layout of the space has."""
        if layout.pipeline == 1 or layout.split != "balanced" or self._wanted.space.pipeline_split == ("balanced",):
            return False
        shape = self.shape(layout, sheet)
        stages = layout.pipeline * layout.stages_per_rank
        return split_of(layout, shape) == torchtitan_split(shape.layers, stages, *shape.ends_less)

    def _trains_everything(self, sheet: Sheet) -> bool:
        return sheet.trains_everything(self._own.state_bytes / self._own.gradient_bytes - 1)

    def _completed(self, layout: Layout, shape: ModelCosts, sheet: Sheet) -> ModelCosts:
        """With what the job and the GPU say."""
        gradient_bytes, compute_bytes = self._own.gradient_bytes, self._compute_bytes(layout, shape)
        roads = self._machines.roads(layout.gpu)
        # Experts are shared out among fewer ranks.
        moved = max(0.0, shape.layer_parameters - (shape.layer_experts if layout.expert > 1 else 0.0))
        hop_bytes = min((size for size, ms in shape.layer.kept if math.isinf(ms)), default=0)
        completed = replace(
            shape,
            traffic=roads.traffic(layout, shape.layers, moved, compute_bytes, gradient_bytes),
            expert_traffic=roads.expert_traffic(
                layout, shape.layers, shape.expert_parameters, compute_bytes, gradient_bytes
            ),
            ends_less=self._own.facts.ends_less,
            state_bytes=self._own.state_bytes,
            gradient_bytes=gradient_bytes,
            compute_bytes=compute_bytes,
            hop_bytes=hop_bytes,
            hop_ms=roads.hop_ms(layout, hop_bytes),
            host_gb_us=self._machines.target(layout).host.host_gb_us,
            memory_gbps=self._machines.target(layout).hardware.mem_bandwidth_gbps,
            budget_bytes=self._machines.room_bytes(layout),
            reserved=self._wanted.goal.budget_kind == "reserved",
            power=budget_of(self._machines.target(layout).hardware),
        )
        return completed if self._trains_everything(sheet) else completed.partly_trained

    def fastest_arithmetic(self, layout: Layout) -> str:
        """Of matrix products, as far as the job says: its own converters may make them as narrow as they like."""
        own = self._own
        if own.python is not None or any("float8" not in name for name in own.converters):
            return "float4"
        return "float8" if layout.float8 or own.converters else "bfloat16"

    def _compute_bytes(self, layout: Layout, shape: ModelCosts) -> int:
        """Bytes of a gathered parameter, at least: 1 where it is float8, or may be."""
        if shape.sharding.gathered_bytes and shape.least_parameters:
            return 2 if shape.sharding.gathered_bytes * layout.tensor >= 1.9 * shape.least_parameters else 1
        own = self._own
        asked = layout.float8 or own.python is not None or any("float8" in name for name in own.converters)
        return 1 if asked else 2
