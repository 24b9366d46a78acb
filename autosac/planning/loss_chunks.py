"""Whether the loss is better computed in chunks of rows, and in how many (`autosac.integrations.chunked_loss`).

A chunked loss frees what its temporaries take at the step's peak, for other activations, and costs the loss's forward a
second time. More chunks free more and cost launches. So there are just as many as make the largest tensor of a chunk small
beside the GPU's memory and its kernels long beside a launch (`LARGEST_BYTES`, 0.1 ms on an H100), and the plan for the step
with a chunked loss competes with the one without.
"""

from __future__ import annotations

from collections.abc import Sequence

from autosac.errors import InfeasibleError
from autosac.limits import MOST_LOSS_CHUNKS
from autosac.memory_sim.tensor_sizes import dense_bytes
from autosac.planning.alternatives import Alternative, Baselines, Planning, may_gain, noted
from autosac.planning.closed_loop import Planned
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
    plain: Sequence[Planned | InfeasibleError], chunks: int, plan: Planning, baselines: Baselines
) -> tuple[Planned | InfeasibleError, ...]:
    """For each budget the better of the plan for the step as it is and of that with the loss in `chunks`, which `plan` makes
    if there is anything to gain. `baselines`: the job's own ways of checkpointing, of its own loss, for plans in chunks.
    """
    if not any(map(may_gain, plain)):
        return tuple(plain)
    if chunks == 1:
        return tuple(noted(result, "the loss is too small for computing it in chunks") for result in plain)
    in_chunks = Alternative(
        name=f"with the loss in {chunks} chunks",
        how=f"the loss is computed in {chunks} chunks of rows, which changes the order of summation",
        lowers="loss",
    )
    return in_chunks.competing(plain, plan, baselines)
