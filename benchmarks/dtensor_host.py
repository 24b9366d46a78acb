"""What the host pays for DTensor, beside plain tensors: ``python -m benchmarks.dtensor_host``.

Thread time on small CPU tensors, one thread, two ranks of a fake process group: single operators, collectives that return new
tensors, and a step of four layers of Llama (TorchTitan). Beside them stands what `HostModel` (`runtime_sim/host.py`) asks for
wrappers and collectives.
"""

from __future__ import annotations

import functools
import logging
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torchtitan.models.llama3.infra.parallelize import apply_tp
from torchtitan.models.llama3.model.args import TransformerModelArgs
from torchtitan.models.llama3.model.model import Transformer

from autosac.runtime_sim import HostModel
from benchmarks.ending import exit_code

_ROUNDS = 15
_LAYERS = 4


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


def _microseconds(call: Callable[[], object], calls: int) -> float:
    """The median of several rounds."""
    times = []
    for _ in range(_ROUNDS):
        begin = time.thread_time()
        for _ in range(calls):
            call()
        times.append(1e6 * (time.thread_time() - begin) / calls)
    return statistics.median(times)


class _Wrappers(TorchDispatchMode):
    """Counts calls that a tensor subclass takes apart, and collectives that return new tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = self.collectives = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(kind.__torch_dispatch__ is not torch._C._disabled_torch_dispatch_impl for kind in types):
            self.calls += 1
            return NotImplemented
        if func.namespace == "_c10d_functional" and not func.__name__.startswith(("wait", "_wrap")):
            self.collectives += 1
        return func(*args, **(kwargs or {}))


def _llama(mesh: DeviceMesh | None) -> Callable[[], object]:
    """A step of the model, divided over the mesh if there is one."""
    arguments = TransformerModelArgs(
        dim=32, n_layers=_LAYERS, n_heads=4, n_kv_heads=2, vocab_size=64, max_seq_len=16, multiple_of=16
    )
    model = Transformer(arguments)
    with torch.no_grad():
        model.init_weights()
    if mesh is not None:
        apply_tp(model, mesh, loss_parallel=False, enable_float8_tensorwise_tp=False)
    tokens = torch.randint(0, 64, (1, 16))
    return lambda: model(tokens).sum().backward()


def _models(mesh: DeviceMesh) -> None:
    plain, divided = _llama(None), _llama(mesh)
    for _ in range(3):  # DTensor decides once for each kind of call
        divided()
    with _Wrappers() as wrappers:
        divided()
    before, after = _microseconds(plain, 3), _microseconds(divided, 3)
    host = HostModel()
    priced = host.wrapper_us * wrappers.calls + host.functional_collective_us * wrappers.collectives
    print(f"{f'step of {_LAYERS} layers of Llama, tensor parallel':<53} {before:7.0f} {after:8.0f}")
    print(f"{wrappers.calls} calls on tensor subclasses, {wrappers.collectives} collectives: priced at {priced:.0f} us")


def run() -> None:
    """Print the times."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.disable(logging.CRITICAL)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    mesh = init_device_mesh("cpu", (2,))
    plain = torch.rand(1, 8, 16, requires_grad=True), torch.rand(16, 16, requires_grad=True)
    placed = [DTensor.from_local(t.detach(), mesh, [p]) for t, p in zip(plain, (Replicate(), Shard(0)), strict=True)]
    sharded = tuple(tensor.requires_grad_() for tensor in placed)
    print(f"{'us on one core':<53} {'plain':>7} {'DTensor':>8}")
    for (name, call), (_, dispatched) in zip(_operators(*plain), _operators(*sharded), strict=True):
        print(f"{name:<53} {_microseconds(call, 200):7.1f} {_microseconds(dispatched, 200):8.1f}", flush=True)
    parts = DTensor.from_local(torch.rand(1, 8, 16), mesh, [Partial()])
    buffer, group = torch.rand(1, 8, 16), mesh.get_group()
    reduced = _microseconds(functools.partial(dist.all_reduce, buffer, group=group), 50)
    redistributed = _microseconds(lambda: parts.redistribute(mesh, [Replicate()]).to_local() + 0, 50)
    print(f"{'all-reduce':<53} {reduced:7.1f} {redistributed:8.1f}", flush=True)
    _models(mesh)
    dist.destroy_process_group()


if __name__ == "__main__":
    sys.exit(exit_code(run))
