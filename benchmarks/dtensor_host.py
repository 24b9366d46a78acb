"""What the host pays for operators of DTensor, beside plain ones: ``python -m benchmarks.dtensor_host``.

Thread time on small CPU tensors, one thread, a mesh of two ranks of a fake process group. `HostModel`
(`runtime_sim/host.py`) has no price for this work.
"""

from __future__ import annotations

import functools
import sys
import time
import warnings
from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from benchmarks.ending import exit_code

_REPEATS = 1000


def _step(activations: torch.Tensor, weight: torch.Tensor) -> None:
    gated = F.silu(F.linear(activations, weight)) * 2
    (gated.to_local() if isinstance(gated, DTensor) else gated).sum().backward()


def _operators(activations: torch.Tensor, weight: torch.Tensor) -> Iterator[tuple[str, Callable[[], object]]]:
    """Name, and a call."""
    yield "add", lambda: activations + activations
    yield "transpose", lambda: activations.transpose(1, 2)
    yield "view", lambda: activations.view(8, 16)
    yield "silu", lambda: F.silu(activations)
    yield "linear layer", lambda: F.linear(activations, weight)
    yield "linear layer, silu and product, forward and backward", functools.partial(_step, activations, weight)


def _microseconds(call: Callable[[], object]) -> float:
    for _ in range(50):
        call()
    begin = time.thread_time()
    for _ in range(_REPEATS):
        call()
    return 1e6 * (time.thread_time() - begin) / _REPEATS


def run() -> None:
    """Print the times."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    mesh = init_device_mesh("cpu", (2,))
    plain = torch.rand(1, 8, 16, requires_grad=True), torch.rand(16, 16, requires_grad=True)
    placed = [DTensor.from_local(t.detach(), mesh, [p]) for t, p in zip(plain, (Replicate(), Shard(0)), strict=True)]
    sharded = tuple(tensor.requires_grad_() for tensor in placed)
    print(f"{'us on one core':<53} {'plain':>7} {'DTensor':>8}")
    for (name, call), (_, dispatched) in zip(_operators(*plain), _operators(*sharded), strict=True):
        print(f"{name:<53} {_microseconds(call):7.1f} {_microseconds(dispatched):8.1f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    sys.exit(exit_code(run))
