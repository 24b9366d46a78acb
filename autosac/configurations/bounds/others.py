"""What a captured microbatch does beside its layers that is no product: it leaves power to products (`bounds.bounds`, 7.)."""

from __future__ import annotations

from collections.abc import Callable

from autosac.configurations.bounds.beside import REDUCED_BYTES
from autosac.configurations.bounds.chains import COMPUTE, PHASES
from autosac.configurations.bounds.shapes import OtherTimes
from autosac.configurations.bounds.sharding import COPIES
from autosac.estimator.models import first_estimates
from autosac.estimator.network.chance import straggling
from autosac.estimator.pricing import default_models, kinds_of
from autosac.simulation import Simulation
from autosac.trace import Label, Op, Signature, TensorMeta


def others_of(simulation: Simulation, scale: float) -> OtherTimes:
    """Of a step of one microbatch. `scale`: how many layers the job has for each that was captured."""
    trace, event_ms = simulation.trace, simulation.pricing.event_ms.tolist()
    others: list[bool] = kinds_of(trace, simulation.pricing, simulation.target.hardware).others.tolist()
    chosen = [
        (event, ms)
        for event, ms, is_other in zip(trace.events, event_ms, others, strict=True)
        if is_other and type(event) is Op
    ]

    def total_ms(counts: Callable[[Op], bool]) -> float:
        return scale * float(sum(ms for event, ms in chosen if counts(event)))

    def is_copy(event: Op) -> bool:
        return event.stream == COMPUTE and trace.signatures[event.signature].name.startswith(COPIES)

    return OtherTimes(
        gathers=total_ms(lambda event: event.stream != COMPUTE),
        adds=scale * _adds_ms(simulation),
        copies=total_ms(is_copy),
        once=total_ms(lambda event: event.stream == COMPUTE and event.phase not in PHASES and not is_copy(event)),
    )


def _adds_ms(simulation: Simulation) -> float:
    """What adding gradients to those that are there takes on a rank's shards, which are as large as its parameters."""
    trace, target = simulation.trace, simulation.target
    sizes = [row.nbytes // REDUCED_BYTES for row in trace.storages if row.label is Label.PARAMETER and row.nbytes]
    models = default_models(target.hardware)
    each = first_estimates(models.operators, [_addition(size) for size in sizes])
    alone_ms = sum(answer.ms for answer in each)
    return float(alone_ms * straggling(trace.info.world_size, target.cluster.gpu_spread))


def _addition(size: int) -> Signature:
    """Of so many numbers to as many."""
    gradients = TensorMeta((size,), (1,), "float32")
    return Signature("aten.add_.Tensor", (gradients, gradients), (gradients,), mutates=(0,))
