"""The GPUs that one process of a script uses: one is simulated."""

from __future__ import annotations

from collections.abc import Set

from autosac.errors import UsageError
from autosac.scripts.request import ScriptRequest


def check_devices(indices: Set[int], request: ScriptRequest) -> None:
    """CUDA's own error for a GPU that is not there, UsageError where a process spreads its work over several.

    A rank may put something on the first GPU by oversight (`torch.load` without `map_location`): that is counted as its own.
    """
    import torch

    nproc = request.nproc or 1
    if max(indices) >= nproc:
        raise torch.AcceleratorError(
            f"CUDA error: invalid device ordinal (cuda:{max(indices)} of {nproc} GPU{'s' if nproc > 1 else ''})"
        )
    own = indices if request.rank % nproc == 0 else indices - {0}
    if len(own) > 1:
        raise UsageError(
            f"the script puts tensors on {', '.join(f'cuda:{i}' for i in sorted(own))} in one process: each process is "
            "simulated with one GPU (several of them: tensor or pipeline parallelism with torch.distributed)"
        )
