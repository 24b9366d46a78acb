"""Capture of any eager PyTorch training step.

A job is a function ``make_step(device)`` that builds model, optimizer and data on `device` and returns either the step, a
callable without arguments, or ``(model, step)``. It is called in a child process (`step_process`).
"""

from __future__ import annotations

import gc
import hashlib
import json
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch

from autosac import errors
from autosac.call_stack import with_room
from autosac.capture.compiler import partition
from autosac.capture.device import dynamic
from autosac.capture.device.device import DEVICE_TYPE
from autosac.capture.device.precision import cudnn_allows_tf32, matmul_allows_tf32
from autosac.capture.failures import IN_A_STEP, capture_error, how_it_ended
from autosac.capture.jobs import handover
from autosac.capture.jobs.script_model import ModelFinder
from autosac.capture.jobs.session import CaptureSession, prepare
from autosac.capture.jobs.step_process import Files, StepProcess, run_in_child
from autosac.capture.jobs.transforms import apply_plan_file, checkpointing_of, observe_candidates, sliced_as_asked
from autosac.capture.patches import installing as patches
from autosac.capture.record.recorder import Recorder
from autosac.files.temporary import temporary_folder
from autosac.integrations import optimizer_slices
from autosac.integrations.chunked_loss import captured_in
from autosac.integrations.operators import modules
from autosac.plans import Plan
from autosac.target import TargetGPU
from autosac.trace import Trace, TraceInfo

Step = Callable[[], Any]
MakeStep = Callable[[torch.device], "Step | tuple[torch.nn.Module, Step]"]


@dataclass(frozen=True, slots=True, kw_only=True)
class EagerRequest:
    """One capture of an eager step: `steps` steps are run (of a job with DDP at least three), the last is kept.

    `target` is "gpu" (what CUDA would run on `gpu`) or "cpu" (what this machine's CPU would run). `plan_file` applies a
    plan to the model, `observe` records the regions of all modules that could be checkpointed. `loss_chunks` > 1 decides for
    losses made by `autosac.chunked_loss`, `optimizer_slice_bytes` > 0 for optimizers (a plan decides both itself).
    """

    gpu: TargetGPU = field(default_factory=TargetGPU)
    target: str = "gpu"
    steps: int = 2
    plan_file: str | None = None
    observe: bool = False
    loss_chunks: int = 1
    optimizer_slice_bytes: int = 0

    def __post_init__(self) -> None:
        if self.target not in ("gpu", "cpu"):
            raise errors.UsageError(f"target {self.target!r}: expected 'gpu' or 'cpu'")
        if self.steps < 2:
            raise errors.UsageError(
                "at least two steps are needed: the first creates the optimizer's states and caches"
            )


_found: weakref.WeakKeyDictionary[MakeStep, dict[tuple[TargetGPU, str], list[bytes]]] = weakref.WeakKeyDictionary()
"""What captures of a step have found, by GPU and target (`handover`). Other steps get none of it: after a few dozen steps a
capture would read for longer than it takes to find out.
"""


def capture_eager(
    make_step: MakeStep, request: EagerRequest, process: StepProcess[EagerRequest] | None = None
) -> Trace:
    """Capture in a child process, or in one that `process` forks (see `step_process`). The errors of `capture_eager_here`,
    raised in the caller's process.
    """
    patches.import_patched()
    with temporary_folder() as folder:
        files = Files.below(folder)
        if process is not None:
            code = process.capture(files, request)
        else:
            code = run_in_child(partial(_capture_into, make_step, files, request))
        if files.error.exists():
            kind, message = json.loads(files.error.read_text())
            raise getattr(errors, kind)(message)
        if not files.trace.exists():
            raise errors.CaptureError(f"the capture process {how_it_ended(code)}")
        if packed := handover.load(files.found):
            with suppress(TypeError):  # a callable that cannot be referred to weakly
                _found.setdefault(make_step, {}).setdefault((request.gpu, request.target), []).append(packed)
        return Trace.load(files.trace, trusted=True)


def step_process(make_step: MakeStep, gpu: TargetGPU) -> StepProcess[EagerRequest]:
    """A process for captures of a step that compiles something: each then takes a second instead of five."""
    return StepProcess(partial(_capture_into, make_step), gpu)


@with_room
def _capture_into(make_step: MakeStep, files: Files, request: EagerRequest) -> None:
    torch.set_num_threads(1)  # pools of the parent's threads do not survive a fork
    gc.freeze()  # what the parent has made is none of the capture's: collections need not go through it
    try:
        _use_found(make_step, request)
        capture_eager_here(make_step, request).save(files.trace)
    except BaseException as e:
        error = capture_error(e, "capturing the training step")
        files.error.write_text(json.dumps([type(error).__name__, str(error)]))
    else:
        handover.save(files.found)


def _use_found(make_step: MakeStep, request: EagerRequest) -> None:
    """What captures of the step before this one have found."""
    packed: list[bytes] = []
    with suppress(TypeError):
        packed = _found.get(make_step, {}).get((request.gpu, request.target), [])
    if packed and request.target == "gpu":
        prepare(request.gpu)
    for one in packed:
        handover.unpack(one)


def capture_eager_here(make_step: MakeStep, request: EagerRequest) -> Trace:
    """Capture in this process, once per process. CaptureError names the call that failed."""
    session = CaptureSession(request.gpu, DEVICE_TYPE if request.target == "gpu" else "cpu")
    assumed: dict[str, None] = {}
    dynamic.on_assumption(lambda text: assumed.setdefault(text))
    sliced = sliced_as_asked(request.plan_file, request.optimizer_slice_bytes)
    with session.active() as recorder, _losses_of(request), sliced:
        finder = ModelFinder(partial(_change, request, recorder), compiles=not request.observe)
        finder.install()
        try:
            made = make_step(session.device)
        except Exception as e:
            raise capture_error(e, "building the training step") from e
        model, step = made if isinstance(made, tuple) else (None, made)
        _complete(finder, model, request, recorder)
        _run_steps(model, step, request, recorder)
        if request.target == "gpu" and not recorder.storages.storages:
            raise errors.CaptureError(
                "the step put nothing on the simulated GPU: build model and batch on the device that make_step is called with"
            )
        info = replace(_info(model, request), compiled=finder.is_compiled, notes=(*assumed, *partition.left_out()))
        return recorder.trace(info)


def _change(request: EagerRequest, recorder: Recorder, model: torch.nn.Module) -> None:
    """What is done to the model of a request, before anything compiles it."""
    if request.plan_file:
        apply_plan_file(model, request.plan_file, recorder)
    elif request.observe:
        observe_candidates([model], recorder)


def _complete(finder: ModelFinder, model: Any, request: EagerRequest, recorder: Recorder) -> None:
    """Change the model, unless that was done where it was compiled. UsageError if it was not complete there."""
    if not (request.observe or request.plan_file):
        return
    if model is None:
        raise errors.UsageError("planning needs the model: make_step(device) has to return (model, step)")
    if finder.model is None:
        _change(request, recorder, model)
    elif finder.model is not modules.unwrapped(model):
        raise errors.UsageError(
            "make_step compiles or wraps a module before it is a part of the model that make_step returns: build the whole "
            "model first"
        )


def _losses_of(request: EagerRequest) -> AbstractContextManager[None]:
    """Losses in as many chunks as the plan or the request says; with 1, as the training step made them."""
    chunks = Plan.load(request.plan_file).settings.loss_chunks if request.plan_file else request.loss_chunks
    return nullcontext() if chunks == 1 else captured_in(chunks)


def _run_steps(model: Any, step: Step, request: EagerRequest, recorder: Recorder) -> None:
    if model is not None:
        recorder.add_model(model)
    for number, _ in recorder.steps(request.steps):
        with _no_automatic_collection():
            try:
                step()
            except Exception as e:
                raise capture_error(e, f"{IN_A_STEP} {number}") from e


@contextmanager
def _no_automatic_collection() -> Iterator[None]:
    """Garbage collection at the step's boundaries only, so that a capture is deterministic."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def _info(model: Any, request: EagerRequest) -> TraceInfo:
    shapes = modules.shapes_by_name([model]) if model is not None else {}
    digest = hashlib.sha256(json.dumps(shapes, sort_keys=True).encode()).hexdigest()
    return TraceInfo(
        job_fingerprint=digest,
        model=modules.class_name(model) if model is not None else "",
        gpu=request.gpu.name if request.target == "gpu" else "cpu",
        torch_version=torch.__version__,
        parameter_shapes=shapes,
        **checkpointing_of([model] if model is not None else [], request.plan_file),
        matmul_allows_tf32=matmul_allows_tf32(),
        cudnn_allows_tf32=cudnn_allows_tf32(),
        loss_chunks=request.loss_chunks,
        optimizer_slice_bytes=optimizer_slices.in_force(),
    )
