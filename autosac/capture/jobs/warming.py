"""What modules compile by themselves, compiled once for all captures of a job.

TorchTitan compiles flexible attention and its masks as functions, also in models that are not compiled: half of the time of
such a capture. A process that forks captures runs a few layers of the model by themselves on the simulated device; what
Dynamo and Inductor have compiled then is inherited. It is used where Dynamo's guards hold, which ask for the same sizes,
types and functions; elsewhere a capture compiles as ever.

So that a capture compiles what it would have compiled alone, it must see no other sizes first (Dynamo takes sizes that change
for dynamic ones): only jobs whose layers run on whole sequences and all heads are run so (`runs_alone`).

Autograd's threads do not survive a fork, and its engine starts one for each device when it runs for the first time.
`start_without_threads` lets it run while there is no device.

What was compiled for one job is nothing for another (`forget`).
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.attention import flex_attention

from autosac.capture.compiler import partition
from autosac.capture.compiler.inherited import compiling
from autosac.capture.device import device as simulated
from autosac.capture.device.mode import SimulatedDeviceMode
from autosac.capture.jobs.adapter import TitanAdapter
from autosac.capture.jobs.layers import kinds, repetition
from autosac.capture.patches.kernels import accept_device
from autosac.capture.record.recorder import Recorder
from autosac.capture.request import TitanRequest
from autosac.titan.settings import compiles_model

_FORWARDS = 2
"""The first call of flexible attention gives a warning, and a guard asks whether that has been given."""


_without_threads: list[bool] = []


def start_without_threads() -> None:
    """Let autograd's engine run once, before the simulated device is there, unless there is one that it knows."""
    if not torch.accelerator.is_available():
        torch.ones((), requires_grad=True).backward()
        _without_threads.append(True)


def runs_alone(adapter: TitanAdapter, config: Any, request: TitanRequest) -> bool:
    """Whether the job's layers, run by themselves, call functions as they do in the job, on a rank that FSDP gives its own
    sequences.
    """
    if request.world_size == 1 or compiles_model(adapter.settings(config)):
        return False
    parallelism = config.parallelism
    names = ("data_parallel_replicate", "tensor_parallel", "pipeline_parallel", "context_parallel")
    return all(int(getattr(parallelism, f"{name}_degree")) == 1 for name in names)


def compile_functions(adapter: TitanAdapter, request: TitanRequest) -> None:
    """See the module's docstring. Any exception of what is run; then nothing is kept of what was compiled."""
    config = adapter.parse(request)
    if not _without_threads or not runs_alone(adapter, config, request):
        return
    leading, period = repetition(kinds(adapter.layers(config)))
    target = simulated.device_type()
    recorder = Recorder(target)
    accept_device()
    partition.install(target)
    warned: set[str] = getattr(flex_attention, "_WARNINGS_SHOWN", set())
    before = set(warned)
    simulated.set_log(recorder)
    try:
        with compiling(), SimulatedDeviceMode(target, recorder), torch.autograd.set_multithreading_enabled(False):
            _run(adapter, config, leading + period, torch.device(target, 0))
    except BaseException:
        forget()
        raise
    finally:
        simulated.set_log(None)
        warned &= before


def _run(adapter: TitanAdapter, config: Any, layers: int, device: torch.device) -> None:
    run = adapter.alone(config, layers, device)
    if run is not None:
        for _ in range(_FORWARDS):
            result = run()
            result.backward(torch.empty_like(result))


def forget() -> None:
    """Let this process compile everything itself."""
    torch._dynamo.reset()
    partition.forget_notes()
