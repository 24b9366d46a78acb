"""A job with fewer of its layers, for induction over their number (`autosac.induction`).

The layers' kinds are found before anything is captured: from what distinguishes one layer from another in the model as it is
built on the meta device (0.2) or in its configuration (0.3). An attribute whose values are all different is a function of the
layer's index (its number, the scale of its initial weights) and no kind of its own; should it matter to an operator, the
induction notices.

    kinds   d d d s f s f s f      leading = 3, period = 2

Under a plan that treats equal layers alike, the job's layers may be left out as well, and the plan's units in them
(`autosac.plans.layers`); what a plan does in a layer is a part of the layer's kind.

A job is cut to n, n + p, n + 2p, ... layers where p is a multiple of that period, of N under selective-N checkpointing, and
of the number of pipeline stages, so that each stage gets as many layers more as any other; n leaves every stage enough layers
for a first, a last, and one between, and with expert parallelism for one more: what the experts' own FSDP units gather and
free is another thing in the first two.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from math import lcm, prod
from pathlib import Path
from typing import Any, NamedTuple

from torch import nn

from autosac.capture.jobs.adapter import Attributes, TitanAdapter
from autosac.capture.processors import available_processors
from autosac.capture.request import TitanRequest
from autosac.errors import TooFewLayersError
from autosac.plans import Plan
from autosac.plans.layers import doings
from autosac.titan.settings import compiles_model
from autosac.trace import Cut

# The layers of the cuts, and what their processes cost besides (as layers, each), must be this part of all, as far as they
# are captured one after the other.
_WORTHWHILE = 0.75
_FIXED_COST_LAYERS = 8 / 3
_COMPILING_COST_LAYERS = 40.0  # to compile a layer takes as long as to run forty of them
known_layers: dict[tuple[object, ...], list[Attributes]] = {}  # by job (`know_layers`)
_NAMED_LAYER = re.compile(r"layers\.\d")


class Layering(NamedTuple):
    """`layers` in all: `leading` of any kind, then kinds that repeat with `period`."""

    layers: int
    leading: int
    period: int

    def cut(self, index: int) -> int:
        """The number of layers of the index-th cut."""
        least = self.leading + 3 * self.period
        return least + (self.layers - least) % self.period + index * self.period

    def is_worthwhile(self, *, compiled: bool = False, cuts: int = 3, first: int = 0, processors: int = 1) -> bool:
        """Whether so many cuts, from the `first` on, take clearly less time than the whole, on so many processors that have
        nothing else to do, and no more work.
        """
        fixed = _COMPILING_COST_LAYERS if compiled else _FIXED_COST_LAYERS
        loads = [0.0] * processors
        for i in reversed(range(cuts)):  # the largest first
            loads[loads.index(min(loads))] += self.cut(first + i) + fixed
        return sum(loads) <= self.layers + fixed and max(loads) <= _WORTHWHILE * self.layers


def cut_of(adapter: TitanAdapter, config: Any, request: TitanRequest) -> tuple[Any, Cut | None]:
    """The configuration with the number of layers that the request asks for, and the cut, if it is one.

    The 0th cut of a job that is not worth cutting is the job itself; others are a TooFewLayersError.
    """
    if request.layers is not None:
        return adapter.with_layers(config, request.layers), None
    if request.cut is None:
        return config, None
    found = layering_of(adapter, config, request)
    first = int(_divides_experts(config.parallelism))
    compiled = compiles_model(adapter.settings(config))
    alone = request.is_decisive and int(config.parallelism.pipeline_parallel_degree) == 1  # else others run beside
    processors = available_processors() if alone else 1
    # Alone, a small cut is always worthwhile.
    worthwhile = found is not None and (
        request.cut < 0 or found.is_worthwhile(compiled=compiled, cuts=request.cuts, first=first, processors=processors)
    )
    index = request.cut + (request.cut >= 0) * (first + _is_short_stage(config.parallelism, request))
    if found is None or not worthwhile or found.cut(index) >= found.layers:
        if request.cut == 0:
            return config, None
        raise TooFewLayersError("the job has too few equal layers to be captured with fewer")
    count = found.cut(index)
    return adapter.with_layers(config, count), Cut(count, found.period, found.layers)


def layering_of(adapter: TitanAdapter, config: Any, request: TitanRequest) -> Layering | None:
    """How the job's layers repeat; None if they do not, if single layers are named or gathered into buckets, or if the load
    of experts is drawn (each layer has its own).
    """
    parallelism = config.parallelism
    if parallelism.pipeline_parallel_layers_per_stage is not None:
        return None
    if not request.moe_load.is_balanced:
        return None
    if _NAMED_LAYER.search(repr(config)) or _has_buckets(parallelism, request.world_size):
        return None
    attributes = known_layers.get(_job(request)) or adapter.layers(config)
    if not attributes:
        return None
    kind, _, every = adapter.describe(config).checkpointing.partition("-")
    every_nth = int(every) if kind == "selective" and every.isdigit() else 1
    numbers = kinds(attributes)
    if request.plan_file is not None:
        planned = doings(Plan.load(request.plan_file), len(attributes))
        numbers = distinct(list(zip(numbers, planned, strict=True)))
    leading, period = repetition(numbers)
    return Layering(len(attributes), leading, _pipeline_stages(parallelism) * lcm(period, every_nth))


def know_layers(adapter: TitanAdapter, config: Any, request: TitanRequest) -> None:
    """Find out what distinguishes the job's layers, which takes as long as a few of its layers do, for all captures of the job
    that this process forks.
    """
    key = _job(request)
    if key not in known_layers:
        known_layers[key] = adapter.layers(config)


def _job(request: TitanRequest) -> tuple[object, ...]:
    """A job file that has changed meanwhile is another job."""
    path = Path(request.config_file or "")
    return request.config_file, request.overrides, path.stat().st_mtime_ns if path.is_file() else None


def _has_buckets(parallelism: Any, world_size: int) -> bool:
    """DistributedDataParallel fills buckets of a fixed size: how many layers share one only shows in the whole job."""
    replicas = int(parallelism.data_parallel_replicate_degree)
    shards = int(parallelism.data_parallel_shard_degree)
    names = ("tensor_parallel_degree", "pipeline_parallel_degree", "context_parallel_degree")
    others = prod(int(getattr(parallelism, name)) for name in names)
    return replicas > 1 and (shards == 1 or replicas * others == world_size)


def _pipeline_stages(parallelism: Any) -> int:
    """The number of pipeline stages by TorchTitan's default: two a rank where a schedule takes several."""
    degree = int(parallelism.pipeline_parallel_degree)
    if degree <= 1:
        return 1
    from torch.distributed.pipelining.schedules import PipelineScheduleSingle, get_schedule_class

    schedule = get_schedule_class(parallelism.pipeline_parallel_schedule)
    return degree if issubclass(schedule, PipelineScheduleSingle) else 2 * degree


def _is_short_stage(parallelism: Any, request: TitanRequest) -> bool:
    """Whether this rank is of the last of several pipeline stages, which TorchTitan gives fewer layers than the others. (The
    first one gets fewer too, and one of those that are left over.)
    """
    degree = int(parallelism.pipeline_parallel_degree)
    return degree > 2 and request.rank >= request.world_size // degree * (degree - 1)


def _divides_experts(parallelism: Any) -> bool:
    """Whether the job has expert parallelism."""
    return int(getattr(parallelism, "expert_parallel_degree", 1)) > 1


def kinds(layers: Sequence[Attributes]) -> list[int]:
    """A number for each layer, equal for layers that differ only in functions of their index."""
    values: dict[str, list[Any]] = {}
    for layer in layers:
        for name, value in layer.items():
            values.setdefault(name, []).append(value)
    telling = [name for name, found in values.items() if len(set(found)) < len(layers)]
    return distinct([tuple(layer.get(name) for name in telling) for layer in layers])


def distinct(values: Sequence[Any]) -> list[int]:
    """A number for each value, equal for equal ones."""
    numbers: dict[Any, int] = {}
    return [numbers.setdefault(value, len(numbers)) for value in values]


def repetition(numbers: Sequence[int]) -> tuple[int, int]:
    """(how many lead, period of the others): what needs the fewest layers in the smallest cut; (all, 1) if nothing repeats."""
    found: list[tuple[int, int]] = []
    for period in range(1, len(numbers) // 2 + 1):
        leading = len(numbers) - period
        while leading > 0 and numbers[leading - 1] == numbers[leading - 1 + period]:
            leading -= 1
        if leading + 2 * period <= len(numbers):
            found.append((leading, period))
    return min(found, key=lambda pair: pair[0] + 3 * pair[1], default=(len(numbers), 1))


# ---- what distinguishes a layer ----------------------------------------------------------------------------------------


def module_attributes(layer: nn.Module) -> Attributes:
    """Everything of a module tree that can distinguish it from another, by path."""
    found: Attributes = {}
    for path, module in layer.named_modules():
        found[f"{path}:"] = type(module)
        for name, value in vars(module).items():
            if not name.startswith("_"):
                found[f"{path}.{name}"] = _leaf(value)
    for name, parameter in [*layer.named_parameters(), *layer.named_buffers()]:
        found[f"{name}:"] = (tuple(parameter.shape), parameter.dtype, parameter.requires_grad)
    return found


def config_attributes(config: Any, path: str = "") -> Attributes:
    """The same of a tree of dataclasses."""
    found: Attributes = {f"{path}:": type(config)}
    for field in dataclasses.fields(config):
        value = getattr(config, field.name, None)
        name = f"{path}.{field.name}"
        if dataclasses.is_dataclass(value):
            found |= config_attributes(value, name)
        else:
            found[name] = _leaf(value)
    return found


def _leaf(value: Any) -> Any:
    """A hashable value that compares as the attribute does: simple ones by value, others by name or type."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, (list, tuple)):
        return tuple(_leaf(v) for v in value)
    if isinstance(value, dict):
        return tuple((str(key), _leaf(v)) for key, v in value.items())
    if dataclasses.is_dataclass(value):
        return repr(value)
    keywords = getattr(value, "keywords", None)  # functools.partial
    if isinstance(keywords, dict):
        return (_leaf(getattr(value, "func", None)), _leaf(keywords))
    name = getattr(value, "__qualname__", None)
    return name if isinstance(name, str) else type(value).__qualname__
