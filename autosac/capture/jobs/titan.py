"""Capture of a TorchTitan job: its own Trainer, unmodified, on the simulated device.

Only two things are replaced, through TorchTitan's public configuration: the tokenizer and the data loader, by synthetic ones
of the right shape. How a job is read and its Trainer built is each version's own: `titan_v02`, `titan_v03`, behind
`adapter.TitanAdapter`. Capturing imports torchtitan; the simulated device has to be installed before.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable
from dataclasses import asdict, replace
from typing import Any

import torch

from autosac.capture.device import values
from autosac.capture.device.precision import cudnn_allows_tf32, matmul_allows_tf32
from autosac.capture.failures import IN_A_STEP, capture_error, one_line
from autosac.capture.jobs.adapter import JobDescription, TitanAdapter
from autosac.capture.jobs.layers import cut_of
from autosac.capture.jobs.microbatches import Microbatches, repeats
from autosac.capture.jobs.notes import notes_of
from autosac.capture.jobs.pipeline import StageMetadata
from autosac.capture.jobs.routing import routing_of
from autosac.capture.jobs.session import CaptureSession
from autosac.capture.jobs.titan_accumulation import AccumulatedMicrobatches, accumulates
from autosac.capture.moe_load import Routing
from autosac.capture.patches import libraries, meshes, process_group, without_triton
from autosac.capture.record.recorder import Recorder
from autosac.capture.record.repeats import RepetitionError
from autosac.capture.request import TitanRequest
from autosac.errors import CaptureError
from autosac.integrations import optimizer_slices
from autosac.integrations.operators import modules
from autosac.plans import Plan
from autosac.target import TargetGPU
from autosac.titan.settings import check_compiles, check_settings, compiles_model
from autosac.titan.version import has_python_jobs, installed_version
from autosac.trace import LoadDraw, Parallelism, Trace, TraceInfo


def installed_adapter() -> TitanAdapter:
    """The adapter for the TorchTitan that is installed."""
    if has_python_jobs():
        from autosac.capture.jobs.titan_v03 import TitanV03

        return TitanV03()
    from autosac.capture.jobs.titan_v02 import TitanV02

    return TitanV02()


def import_torchtitan(gpu: TargetGPU) -> None:
    """Import torchtitan for this GPU. CaptureError in one line where it is missing or its own imports fail."""
    libraries.install_torchao(gpu)  # which TorchTitan imports
    libraries.install_muon()
    try:
        if without_triton.is_missing():
            without_triton.import_kernels()
        import torchtitan.train  # noqa: F401
    except ImportError as e:
        raise CaptureError(f"torchtitan cannot be imported: {one_line(e)}") from e


def job_fingerprint(settings: dict[str, str], world_size: int) -> str:
    """A hash of what is computed: the decisive settings and the world size, not checkpointing and not the rank."""
    document = json.dumps({"world_size": world_size, **settings}, sort_keys=True)
    return hashlib.sha256(document.encode()).hexdigest()


def capture_titan(
    request: TitanRequest,
    progress: Callable[[str], None] = lambda _: None,
    early: Callable[[TraceInfo], None] = lambda _: None,
) -> Trace:
    """Run the job for `request.steps` steps (`Recorder.steps`) on the simulated device and return the last one's Trace.

    `early` receives what captures of other pipeline stages need (`CaptureFuture.early`) before the first step has run.
    Once per process. UsageError for a wrong job, CaptureError (with the operator or call) for one that cannot run,
    RepetitionError for one of which microbatches were taken for equal that are not.
    """
    session = CaptureSession(request.gpu)
    logging.disable(logging.WARNING)
    process_group.initialise(request.world_size, request.rank, request.ranks_per_node)
    meshes.install(request.rank)
    import_torchtitan(request.gpu)
    # Not when it is imported: what this changes guards the compiled code that a capture inherits.
    libraries.install_torchtitan(request.gpu)
    stages = StageMetadata()
    stages.received = request.stage_inputs
    stages.install()
    adapter = installed_adapter()
    config = adapter.parse(request)
    settings = adapter.settings(config)
    if request.plan_file is not None:
        check_settings(Plan.load(request.plan_file).made_for.job_settings, settings)
    check_compiles(request.gpu, settings)
    if request.observe and compiles_model(settings):
        _leave_uncompiled(config)
    config, cut = cut_of(adapter, config, request)
    from autosac.capture.jobs.transforms import sliced_as_asked, transform_of

    with session.active() as recorder, sliced_as_asked(request.plan_file, request.optimizer_slice_bytes):
        routing = _routing(request, recorder)
        values.route_by(routing)
        if routing is not None:
            stages.on_inferred = routing.begin_step  # those runs are none of the step
        progress("building the model")
        try:
            trainer = adapter.build(config, transform_of(request, recorder, cut.layers if cut else request.layers))
        except Exception as e:
            raise capture_error(e, "building the job") from e
        for part in trainer.model_parts:
            recorder.add_model(part)
        compiled = compiles_model(settings) and (request.observe or any(map(modules.has_compiled, trainer.model_parts)))
        known = TraceInfo(parallelism=_degrees(trainer), cut=cut, compiled=compiled)
        stages.on_sent = lambda layouts: early(replace(known, stage_outputs=layouts))
        if request.repeats and routing is None:
            _copy_microbatches(session, recorder, trainer, is_compared=not request.cut or request.cut < 0)
        trainer.step = 1
        trainer.metrics_processor.should_log = lambda _: False
        batches = trainer.batch_generator(trainer.dataloader)
        for step, last in recorder.steps(request.steps):
            progress(f"step {step} of {last}")
            if routing is not None:
                routing.begin_step()
            try:
                trainer.train_step(batches)
            except RepetitionError:
                raise
            except Exception as e:
                raise capture_error(e, f"{IN_A_STEP} {step}") from e
        known = replace(known, stage_outputs=stages.sent)
        return recorder.trace(_info(request, config, settings, trainer, adapter.describe(config), known))


def _copy_microbatches(session: CaptureSession, recorder: Recorder, trainer: Any, *, is_compared: bool) -> None:
    """Let few of a step's microbatches run, if it has many that are alike. `is_compared`: see `Microbatches`."""
    if accumulates(trainer):
        AccumulatedMicrobatches(session.mode, recorder, trainer)
    if trainer.parallel_dims.pp_enabled and repeats(trainer.pp_schedule):
        Microbatches(session.mode, recorder, trainer.pp_schedule, is_compared=is_compared).install()


def _leave_uncompiled(config: Any) -> None:
    """A policy decides on the operators that the model calls, which compiled code does not. What TorchTitan does to compiled
    code only (asynchronous tensor parallelism), and refuses without, is left out.
    """
    config.compile.components = [component for component in config.compile.components if component != "model"]
    for section in (config.parallelism, config.compile):  # TorchTitan 0.2, 0.3
        if hasattr(section, "enable_async_tensor_parallel"):
            section.enable_async_tensor_parallel = False


def _routing(request: TitanRequest, recorder: Recorder) -> Routing | None:
    """The random routing of tokens to experts; None if it is balanced."""
    if request.moe_load.is_balanced:
        return None
    return routing_of(request.moe_load, request.rank, recorder)


def _info(
    request: TitanRequest, config: Any, settings: dict[str, str], trainer: Any, job: JobDescription, known: TraceInfo
) -> TraceInfo:
    """What the trace is of, beside what is `known`."""
    training = config.training
    return replace(
        known,
        model=job.model,
        checkpointing="plan" if request.checkpointing == "plan" else job.checkpointing,
        own_checkpointing=job.own,
        preserve_rng_state=job.preserve_rng_state,
        early_stop=job.early_stop,
        loss_chunks=job.loss_chunks,
        optimizer_slice_bytes=optimizer_slices.in_force(),
        moe_load=None if request.moe_load.is_balanced else LoadDraw(**asdict(request.moe_load)),
        job_fingerprint=job_fingerprint(settings, request.world_size),
        job_settings=settings,
        notes=(*notes_of(config, settings, job.validates, compiled=known.compiled), *job.notes),
        world_size=request.world_size,
        rank=request.rank,
        gpu=request.gpu.name,
        torch_version=torch.__version__,
        torchtitan_version=installed_version(),
        local_batch_size=training.local_batch_size,
        seq_len=training.seq_len,
        tokens_per_step=training.local_batch_size * training.seq_len * trainer.gradient_accumulation_steps,
        flops_per_token=float(trainer.metrics_processor.num_flops_per_token),
        parameter_shapes=modules.shapes_by_name(trainer.model_parts),
        fsdp_units=tuple(fsdp_units(trainer.model_parts)),
        selective_modules=modules.selectively_checkpointed(trainer.model_parts),
        matmul_allows_tf32=matmul_allows_tf32(),
        cudnn_allows_tf32=cudnn_allows_tf32(),
    )


def _degrees(trainer: Any) -> Parallelism:
    return Parallelism(**{name: int(getattr(trainer.parallel_dims, name, 1)) for name in Parallelism._fields})


def fsdp_units(model_parts: list[torch.nn.Module]) -> list[str]:
    """Clean names of the modules that FSDP manages as units."""
    from torch.distributed.fsdp import FSDPModule

    return sorted(
        {
            modules.clean_name(name)
            for part in model_parts
            for name, module in modules.unwrapped(part).named_modules()
            if isinstance(module, FSDPModule)
        }
    )
