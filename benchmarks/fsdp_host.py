"""What the host pays for FSDP2's hooks: ``python -m benchmarks.fsdp_host``.

Thread time on small CPU tensors, one thread, eight ranks of a fake process group: models of eight units of n linear layers,
plain and sharded, their steps by turns. The difference of the forwards is what it takes to gather a unit's parameters and to
release them; that of the backwards is the same and the reduction of the gradients. Times are stated for `HostModel`'s host
(`runtime_sim/host.py`): they are divided by what a plain linear layer takes beside what `HostModel` asks for it. The last two
columns are what `HostModel` asks for the hooks.
"""

from __future__ import annotations

import gc
import logging
import statistics
import sys
import time
import warnings
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from autosac.runtime_sim import HostModel
from benchmarks.ending import exit_code

_UNITS, _ROUNDS, _WARM_UP = 8, 25, 5
_WIDTH = 16


class _Times(NamedTuple):
    """Microseconds of a step's two halves."""

    forward: float
    backward: float


def _model(parameters: int, mesh: DeviceMesh | None) -> nn.Module:
    units = [nn.Sequential(*(nn.Linear(_WIDTH, _WIDTH, bias=False) for _ in range(parameters))) for _ in range(_UNITS)]
    model = nn.Sequential(*units)
    if mesh is not None:
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        for unit in units:
            fully_shard(unit, mesh=mesh, mp_policy=policy)
        fully_shard(model, mesh=mesh, mp_policy=policy)
    return model


def _step(model: nn.Module, inputs: torch.Tensor) -> _Times:
    begin = time.thread_time()
    loss = model(inputs).sum()
    middle = time.thread_time()
    loss.backward()
    return _Times(1e6 * (middle - begin), 1e6 * (time.thread_time() - middle))


def _medians(times: list[_Times]) -> _Times:
    forwards, backwards = zip(*times, strict=True)
    return _Times(statistics.median(forwards), statistics.median(backwards))


def _row(parameters: int, mesh: DeviceMesh) -> None:
    host = HostModel()
    inputs = torch.rand(4, _WIDTH)
    plain, sharded = _model(parameters, None), _model(parameters, mesh)
    pairs = [(_step(plain, inputs), _step(sharded, inputs)) for _ in range(_ROUNDS)][_WARM_UP:]
    before, after = _medians([p for p, _ in pairs]), _medians([s for _, s in pairs])
    layers = _UNITS * parameters
    asked = layers * (host.eager_op_us + host.view_op_us + 2 * host.module_us)
    slower = before.forward / asked
    extra = [(after[i] - before[i]) / slower / _UNITS for i in range(2)]
    gather = host.gather_us + host.gathered_parameter_us * parameters
    reduction = host.reduction_us + host.reduced_parameter_us * parameters
    print(
        f"{parameters:10} {slower:7.1f} {extra[0]:9.0f} {extra[1]:9.0f} {gather:9.0f} {gather + reduction:9.0f}",
        flush=True,
    )


def run() -> None:
    """Print the times."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.disable(logging.CRITICAL)
    gc.disable()
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=8)
    mesh = init_device_mesh("cpu", (8,))
    print(f"{'':10} {'slower':>7} {'us of a unit':>19} {'as asked':>19}")
    print(f"{'parameters':10} {'than it':>7} {'forward':>9} {'backward':>9} {'forward':>9} {'backward':>9}")
    for parameters in (4, 8, 12, 16, 24, 32):
        _row(parameters, mesh)
    dist.destroy_process_group()


if __name__ == "__main__":
    sys.exit(exit_code(run))
