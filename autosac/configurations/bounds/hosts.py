"""What the host of a rank pays at least to issue a step: one thread issues everything, so no step is shorter.

Read from the captured step of a few layers and one microbatch (`bounds.sheets`), with the host's prices
(`autosac.runtime_sim.host`), for layouts without a pipeline that shard as the captured step does. A step of m microbatches
issues m times what belongs to a forward and backward, of every layer. Where parameters stay gathered, what FSDP does before a
backward is left out: all that its stream of gathers runs, its collectives and copies, and views of any kind. Gradients are
clipped, and the fused optimizer runs, once a step. Such operators take lists of all parameters, of which each costs time: of N
tensors in the captured step's calls, N // P for each of its P parameters. Events without a phase (of streams) count nothing.
Checkpointing only adds to what is issued.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from autosac.configurations.bounds.chains import COMPUTE, NO_LAYER, PHASES, layer_of_name
from autosac.configurations.space.layout import Layout
from autosac.runtime_sim.host import host_costs, listed_us
from autosac.simulation import Simulation
from autosac.trace import Collective, ModuleEnter, ModuleExit, Op, Phase, Trace

_GATHERS = (
    "fsdp.all_gather",
    "fsdp.split_with_sizes_copy",
    "aten.split_with_sizes_copy",
    "c10d._allgather",
    "c10d.allgather",
)
_ISSUED = (Op, Collective, ModuleEnter, ModuleExit)


class HostTimes(NamedTuple):
    """Milliseconds of the host. `layer`: a repeating layer's forward and backward of one microbatch; `outside`: all else of
    them; `kept_layer`, `kept_outside`: the same where parameters stay gathered; `clipping` and `optimizer`: once a step.
    `sharded`: whether that is of a step with FSDP.
    """

    layer: float = 0.0
    outside: float = 0.0
    kept_layer: float = 0.0
    kept_outside: float = 0.0
    clipping: float = 0.0
    optimizer: float = 0.0
    sharded: bool = False


NO_HOST = HostTimes()


def host_bound_ms(layout: Layout, times: HostTimes, layers: int) -> float:
    """What the host pays for a step of so many layers at least; 0 where nothing is known of that: replicas without shards are
    DDP's, and those of experts may have none.
    """
    sharded = layout.shard * layout.context > 1
    unlike = layout.replicate > 1 and (layout.expert > 1 or not sharded)
    if layout.pipeline > 1 or sharded != times.sharded or unlike:
        return 0.0
    outside = times.kept_outside if layout.keeps_output else times.outside
    each = outside + layers * (times.kept_layer if layout.keeps_parameters else times.layer)
    found = layout.microbatches * each
    if layout.cpu_offload:
        return found
    return found + times.clipping + (times.optimizer if layout.optimizer == "fused" else 0.0)


def hosts_of(
    simulation: Simulation, layer_of: Sequence[int], present: Sequence[int], repeating: Sequence[int], total: int
) -> HostTimes:
    """Of the captured step. `layer_of`: the layer of each module; `present`: the layers that were captured, of which the
    `repeating` ones stand for all those that the job has beyond them; `total`: how many it has.
    """
    trace, target = simulation.trace, simulation.target
    if target.hardware.device == "cpu":  # where the host is the device
        return NO_HOST
    costs_ms = host_costs(trace, target.host, simulation.selective_modules).tolist()
    own: dict[int, float] = defaultdict(float)
    kept: dict[int, float] = defaultdict(float)
    once = dict.fromkeys((Phase.OTHER, Phase.OPTIMIZER), 0.0)
    parameters = [layer_of_name(name) for name in trace.info.parameter_shapes]
    more = (total - len(present)) * sum(map(parameters.count, repeating)) / max(1, len(repeating))
    event: Any
    for event, ms in zip(trace.events, costs_ms, strict=True):
        if not ms or not isinstance(event, _ISSUED):
            continue
        number = layer_of[event.module] if event.module >= 0 else NO_LAYER
        if event.phase in PHASES:
            own[number] += ms
            if event.phase is Phase.FORWARD or not _is_gather(trace, event):
                kept[number] += ms
        elif event.phase in once and type(event) is Op:
            signature = trace.signatures[event.signature]
            tensors = len(signature.inputs) + len(signature.outputs)
            lists = tensors // max(1, len(parameters))
            once[event.phase] += ms + lists * more * listed_us(signature, target.host) / 1e3

    def split(times: Mapping[int, float]) -> tuple[float, float]:
        each = sum(times.get(layer, 0.0) for layer in repeating) / max(1, len(repeating))
        return each, sum(times.values()) - len(present) * each

    (layer, outside), (kept_layer, kept_outside) = split(own), split(kept)
    return HostTimes(
        layer, outside, kept_layer, kept_outside, once[Phase.OTHER], once[Phase.OPTIMIZER], bool(trace.info.fsdp_units)
    )


def _is_gather(trace: Trace, event: Any) -> bool:
    """Whether an event of a backward may be there only because FSDP gathers parameters for it."""
    if not isinstance(event, Op | Collective):
        return False
    signature = trace.signatures[event.signature]
    side = isinstance(event, Op) and event.stream != COMPUTE
    own_view = signature.is_view and not signature.wrappers  # FSDP works on local tensors
    return side or own_view or signature.name.startswith(_GATHERS)
