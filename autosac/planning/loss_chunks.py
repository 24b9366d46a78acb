"""Whether the loss is better computed in chunks of rows, and in how many (`autosac.integrations.chunked_loss`).

A chunked loss frees what its temporaries take at the step's peak, for other activations, and costs the loss's forward a
second time. More chunks free more and cost launches. So there are just as many as make the largest tensor of a chunk small
beside the GPU's memory and its kernels long beside a launch (`LARGEST_BYTES`, 0.1 ms on an H100), and the plan for the step
with a chunked loss competes with the one without.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from autosac.errors import InfeasibleError
from autosac.limits import MOST_LOSS_CHUNKS
from autosac.memory_sim.tensor_sizes import dense_bytes
from autosac.planning.closed_loop import ALSO_FITS, Planned, faster
from autosac.plans import Prediction
from autosac.quantities import format_ms
from autosac.trace import Phase, Trace

LARGEST_BYTES = 2**28


def chunks_of(trace: Trace) -> int:
    """In how many chunks a step would compute its loss, a power of two; 1 if its tensors are small as they are.

    The loss is what the forward runs outside of all modules.
    """
    largest = max(
        (
            dense_bytes(meta)
            for _, op in trace.operators()
            if op.phase is Phase.FORWARD and not trace.modules[op.module]
            for meta in trace.signatures[op.signature].outputs
        ),
        default=0,
    )
    return min(MOST_LOSS_CHUNKS, 1 << max(0, (largest - 1) // LARGEST_BYTES).bit_length())


def competing(
    plain: Sequence[Planned | InfeasibleError],
    chunks: int,
    plan: Callable[[], Sequence[Planned | InfeasibleError]],
    baselines: Callable[[], Mapping[str, Prediction]],
) -> tuple[Planned | InfeasibleError, ...]:
    """For each budget the better of the plan for the step as it is and of that with the loss in `chunks`, which `plan` makes
    if there is anything to gain. `baselines`: the job's own ways of checkpointing, of its own loss, for plans in chunks.
    """
    if not any(map(_may_gain, plain)):
        return tuple(plain)
    if chunks == 1:
        return tuple(_noted(result, "the loss is too small for computing it in chunks") for result in plain)
    return tuple(_better(own, other, chunks, baselines) for own, other in zip(plain, plan(), strict=True))


def _may_gain(result: Planned | InfeasibleError) -> bool:
    return isinstance(result, InfeasibleError) or result.plan.predictions["autosac"].recompute_ms > 0


def _noted(result: Planned | InfeasibleError, note: str) -> Planned | InfeasibleError:
    return result if isinstance(result, InfeasibleError) else replace(result, notes=(*result.notes, note))


def _better(
    own: Planned | InfeasibleError,
    other: Planned | InfeasibleError,
    chunks: int,
    baselines: Callable[[], Mapping[str, Prediction]],
) -> Planned | InfeasibleError:
    if isinstance(own, InfeasibleError) and isinstance(other, InfeasibleError):
        return _neither(own, other, chunks)
    if isinstance(other, InfeasibleError):
        return _noted(own, f"with the loss in {chunks} chunks no plan fits")
    how = f"the loss is computed in {chunks} chunks of rows, which changes the order of summation"
    if isinstance(own, InfeasibleError):
        return _noted(_beside(other, baselines()), f"{how}; without that no plan would fit")
    gain_ms = own.plan.predictions["autosac"].step_ms - other.plan.predictions["autosac"].step_ms
    if gain_ms <= 0:
        return _noted(own, f"with the loss in {chunks} chunks the step would take {format_ms(-gain_ms)} longer")
    found = _beside(other, {name: p for name, p in own.plan.predictions.items() if name != "autosac"})
    return _noted(found, f"{how}: the step is {format_ms(gain_ms)} shorter than without")


def _beside(planned: Planned, baselines: Mapping[str, Prediction]) -> Planned:
    """The plan beside the job's own ways of checkpointing: those of its own loss, which it was not planned beside."""
    made_for, own = planned.plan.made_for, planned.plan.predictions["autosac"]
    fitting = {n: p for n, p in baselines.items() if p.peak_bytes(made_for.budget_kind) <= made_for.budget_bytes}
    if planned.plan.certainty is not None:  # of them it is not known whether they fit with that probability
        fitting = {}
    quicker = faster(own, fitting, planned.simulation.trace.info.compiled)
    notes = tuple(note for note in planned.notes if ALSO_FITS not in note)
    plan = replace(planned.plan, predictions={"autosac": own, **baselines})
    return replace(planned, plan=plan, notes=(*notes, *quicker))


def _neither(own: InfeasibleError, other: InfeasibleError, chunks: int) -> InfeasibleError:
    """What to say where no plan fits: of the step that needs less, which is that with chunks if memory peaks in the loss."""
    if own.in_loss:
        return InfeasibleError(f"with the loss in {chunks} chunks {other}", in_loss=other.in_loss)
    return InfeasibleError(f"{own}; nor does any with the loss in {chunks} chunks")
