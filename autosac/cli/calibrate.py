"""``autosac calibrate``: measure this machine and write a hardware profile that the other commands accept by path.

Order matters: everything that is captured is captured in child processes before the first use of a CUDA device here, for a
process that has a CUDA context cannot fork. Under torchrun all ranks time the collectives, then rank 0 goes on alone.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from autosac.cli.options import add_command, add_output, decimal, filled, filled_path, whole
from autosac.errors import UsageError
from autosac.files.writing import check_outputs
from autosac.limits import MOST_GPUS, whole_from_environment, world_size_of_environment

if TYPE_CHECKING:
    from rich.console import RenderableType

    from autosac.estimator.calibration.campaign import Campaign, CampaignResult
    from autosac.target import TargetGPU
    from autosac.trace import Signature, Trace

_ROUNDS_A_MINUTE, _MOST_ROUNDS = 4, 40
_MOST_TRACES = 1024
_RESERVE = 0.2  # of the time, for host, memory and fits
_CAPTURE_SHARE = 0.15
_COLLECTIVES_SHARE = 0.15
_REFERENCE_GPU = "a100-sxm-80gb"  # prices that only decide what is measured first
_FACTS = (
    "import json, torch; p = torch.cuda.get_device_properties(0); "
    "print(json.dumps([p.name, p.total_memory, p.major, p.minor, p.multi_processor_count, p.L2_cache_size]))"
)
Report = Callable[[int, int, str], None]


def add_calibrate(commands: argparse._SubParsersAction[Any]) -> None:
    """The options."""
    command = add_command(commands, "calibrate", "measure this machine and write a hardware profile")
    command.epilog = "Arguments after -- go to TorchTitan. Under torchrun, collectives are measured too."
    command.add_argument(
        "job",
        type=filled,
        nargs="?",
        metavar="JOB.toml",
        help="measure the operators of this TorchTitan job or saved capture",
    )
    command.add_argument(
        "--from-trace",
        type=filled_path,
        nargs="+",
        metavar="TRACE",
        help="learn from traces of PyTorch's profiler instead of measuring (JSON or gzip, record_shapes=True, one per rank)",
    )
    command.add_argument(
        "--from-run",
        type=filled_path,
        metavar="RUN.json",
        help="correct a profile with the first steps of a run (autosac_run.json, or what autosac.observe wrote)",
    )
    command.add_argument(
        "--gpu",
        type=filled,
        metavar="NAME",
        help="GPU of the traces, or the profile to correct (default: as named there; needs --from-trace or --from-run)",
    )
    command.add_argument(
        "--plan",
        type=filled_path,
        metavar="PLAN.json",
        help="plan that the run followed (default: the file named there)",
    )
    command.add_argument(
        "--sweep", action="store_true", help="measure a standard set of operators (default without a job)"
    )
    command.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="device to measure (default cuda)")
    command.add_argument(
        "-o", "--output", type=filled_path, required=True, metavar="PROFILE.toml", help="file for the profile"
    )
    command.add_argument(
        "--minutes", type=decimal, default=15.0, metavar="M", help="time limit in minutes (default 15)"
    )
    command.add_argument("--resume", action="store_true", help="continue an interrupted calibration")
    command.add_argument(
        "--threads", type=whole(1, 4096), metavar="N", help="number of CPU threads (default: PyTorch's own)"
    )
    command.add_argument(
        "--world-size", type=whole(1, MOST_GPUS), metavar="N", help="number of GPUs of the job (default: $NGPU, else 1)"
    )
    add_output(command)
    command.set_defaults(run="calibrate")


def calibrate(arguments: argparse.Namespace) -> None:
    """Run it; see the module's docstring."""
    begin = time.monotonic()
    _check(arguments)
    if arguments.from_trace:
        from autosac.cli.calibrate_traces import calibrate_from_traces

        with _bar(enabled=not arguments.quiet and not arguments.debug) as report:
            shown = calibrate_from_traces(arguments, report)
        print_result(shown)
        return
    if arguments.from_run is not None:
        from autosac.cli.calibrate_run import calibrate_from_run

        print_result(calibrate_from_run(arguments))
        return
    ranks, rank = _torchrun()
    gpu = _gpu_facts() if arguments.device == "cuda" else None
    with _bar(enabled=not arguments.quiet and not arguments.debug and rank == 0) as report:
        report(0, 1, "capturing what is to be measured")
        found = _wanted(arguments, gpu) if rank == 0 else None
        import torch

        if arguments.threads is not None:
            torch.set_num_threads(arguments.threads)
        collectives: dict[tuple[str, int, int], float] = {}
        if ranks > 1:
            report(0, 1, "collectives")
            collectives = _collectives(arguments, arguments.minutes * 60 * _COLLECTIVES_SHARE)
        if found is None:
            return
        result = _run(arguments, found, collectives, begin + arguments.minutes * 60 * (1 - _RESERVE), report)
    print_result(_document(result) if arguments.json else _summary(result))


def print_result(result: dict[str, Any] | RenderableType) -> None:
    """A document as JSON, anything else as a table."""
    if isinstance(result, dict):
        print(json.dumps(result, indent=1))
        return
    from autosac.report import summaries as reports

    reports.console().print(result)


def _check(arguments: argparse.Namespace) -> None:
    if not 0 < arguments.minutes <= 24 * 60:
        raise UsageError(f"--minutes must be above 0 and at most a day, not {arguments.minutes:g}")
    if arguments.from_trace or arguments.from_run is not None:
        _check_learning(arguments)
    elif arguments.gpu is not None:
        raise UsageError("--gpu names the GPU of traces or a profile: it needs --from-trace or --from-run")
    if arguments.plan is not None and arguments.from_run is None:
        raise UsageError("--plan names the plan that a run followed: it needs --from-run")
    if arguments.job is not None and arguments.sweep:
        raise UsageError("give a job or --sweep, not both")
    if arguments.overrides and arguments.job is None:
        raise UsageError("TorchTitan's arguments need a job")
    if arguments.output.suffix != ".toml":
        raise UsageError(f"{arguments.output}: a profile's name ends in .toml")
    check_outputs([("-o", arguments.output)], [Path(arguments.job)] if arguments.job is not None else [])
    world_size_of_environment()


def _check_learning(arguments: argparse.Namespace) -> None:
    """UsageError for what does not go with traces or a run, which are learned from instead of measuring."""
    option = "--from-trace" if arguments.from_trace else "--from-run"
    measuring = {
        "a job": arguments.job is not None and option == "--from-trace",
        "--from-run": arguments.from_run is not None and option == "--from-trace",
        "--sweep": arguments.sweep,
        "--resume": arguments.resume,
        "--threads": arguments.threads is not None,
        "--device cpu": arguments.device == "cpu",
    }
    given = next((name for name, value in measuring.items() if value), None)
    if given:
        raise UsageError(f"{option} measures nothing and cannot be combined with {given}")
    if option == "--from-run":
        inputs = [arguments.from_run, *([arguments.plan] if arguments.plan is not None else [])]
        check_outputs([("-o", arguments.output)], inputs)
        return
    if len(arguments.from_trace) > _MOST_TRACES:
        raise UsageError(f"at most {_MOST_TRACES} traces at once, not {len(arguments.from_trace)}")
    check_outputs([("-o", arguments.output)], arguments.from_trace)


def _torchrun() -> tuple[int, int]:
    """The number of processes and this one's rank, as torchrun's environment says; one process without it."""
    ranks = whole_from_environment("WORLD_SIZE", 1, 1, MOST_GPUS, "torchrun sets it; unset it otherwise")
    rank = whole_from_environment("RANK", 0, 0, ranks - 1, "torchrun sets it; unset it otherwise")
    whole_from_environment("LOCAL_RANK", 0, 0, 4096, "torchrun sets it; unset it otherwise")
    return ranks, rank


def _gpu_facts() -> TargetGPU:
    """The CUDA device of this machine, asked for in a process of its own."""
    from autosac.target import TargetGPU

    child = subprocess.run([sys.executable, "-c", _FACTS], capture_output=True, text=True)
    if child.returncode:
        raise UsageError("there is no CUDA device to calibrate; --device cpu calibrates the CPU")
    name, memory, major, minor, sm_count, cache = json.loads(child.stdout.splitlines()[-1])
    return TargetGPU(
        name=name, memory_bytes=memory, compute_capability=(major, minor), sm_count=sm_count, l2_bytes=cache
    )


# ---- what is to be measured ------------------------------------------------------------------------------------


def _wanted(arguments: argparse.Namespace, gpu: TargetGPU | None) -> tuple[tuple[Signature, ...], bool, dict[str, Any]]:
    """The operators, whether they are a sample, and the host's probes."""
    from autosac.capture.jobs.eager import EagerRequest, capture_eager
    from autosac.estimator.calibration.campaign import by_value
    from autosac.estimator.calibration.host import Probe, checkpoint_probes, probes
    from autosac.estimator.calibration.sweep import Scale, sweep_step
    from autosac.target import TargetGPU

    of_job = None if arguments.job is None else by_value(_job_trace(arguments, gpu), _REFERENCE_GPU)
    request = EagerRequest(gpu=gpu or TargetGPU(), target="cpu" if gpu is None else "gpu")
    probed = {name: Probe(make, capture_eager(make, request)) for name, make in probes().items()}
    if gpu is None:
        for name, (make, selective) in checkpoint_probes().items():
            probed[name] = Probe(make, capture_eager(make, request), selective)
    if of_job is not None:
        return of_job, False, probed
    rounds = min(max(1, int(arguments.minutes * _ROUNDS_A_MINUTE)), _MOST_ROUNDS)
    scale = Scale.of(arguments.device, gpu.memory_bytes if gpu is not None else 0)
    until = time.monotonic() + arguments.minutes * 60 * _CAPTURE_SHARE
    trace = capture_eager(sweep_step(scale, rounds, until), request)
    return _operators(trace), True, probed


def _operators(trace: Trace) -> tuple[Signature, ...]:
    """In the order in which they appear."""
    from autosac.trace import Op

    return tuple(dict.fromkeys(trace.signatures[event.signature] for event in trace.events if type(event) is Op))


def _job_trace(arguments: argparse.Namespace, gpu: TargetGPU | None) -> Trace:
    from autosac.trace import Trace, is_capture

    if is_capture(arguments.job):
        if arguments.overrides:
            raise UsageError(f"{arguments.job} is a captured step: TorchTitan's arguments need the job")
        return Trace.load(arguments.job)
    if gpu is None:
        raise UsageError(
            f"{arguments.job} is a TorchTitan job, and these run on GPUs: --device cpu needs a saved capture"
        )
    from autosac.capture.process.server import CaptureServer
    from autosac.capture.request import TitanRequest
    from autosac.jobs.checks import check_job_file
    from autosac.titan.version import check_job, has_python_jobs

    world_size = arguments.world_size or world_size_of_environment()
    check_job(arguments.job)
    if not has_python_jobs():
        check_job_file(arguments.job, arguments.overrides, world_size)
    request = TitanRequest(config_file=arguments.job, overrides=arguments.overrides, world_size=world_size, gpu=gpu)
    with CaptureServer(debug=arguments.debug) as server:
        return server.capture(request)


# ---- measuring -------------------------------------------------------------------------------------------------


def _collectives(arguments: argparse.Namespace, seconds: float) -> dict[tuple[str, int, int], float]:
    """Timed by all ranks together."""
    import torch
    import torch.distributed as dist

    from autosac.estimator.calibration.collectives import measure_collectives

    device = torch.device("cpu")
    if arguments.device == "cuda":
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    try:
        found, missing = measure_collectives(device, seconds)
    finally:
        dist.destroy_process_group()
    if os.environ.get("RANK", "0") == "0":
        for kind, why in missing.items():
            print(f"not measured: {kind}: {why}", file=sys.stderr)
    return found


def _run(
    arguments: argparse.Namespace,
    found: tuple[tuple[Signature, ...], bool, dict[str, Any]],
    collectives: dict[tuple[str, int, int], float],
    deadline: float,
    report: Report,
) -> CampaignResult:
    import torch

    from autosac.estimator.calibration.campaign import Campaign
    from autosac.estimator.calibration.campaign import calibrate as run_campaign
    from autosac.estimator.calibration.machine import Machine

    signatures, sampled, probed = found
    campaign: Campaign = Campaign(
        machine=Machine(arguments.device, torch.get_num_threads()),
        signatures=signatures,
        probes=probed,
        output=arguments.output,
        deadline=deadline,
        resume=arguments.resume,
        sampled=sampled,
        collectives=collectives,
    )
    return run_campaign(campaign, report)


# ---- output ----------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _bar(*, enabled: bool) -> Iterator[Report]:
    """A bar on standard error; nothing where nobody watches."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

    from autosac.display.terminal import PlainConsole

    stderr = PlainConsole(stderr=True)
    if not enabled or not stderr.is_terminal:
        yield lambda done, total, text: None
        return
    text = TextColumn("{task.description}", markup=False)
    columns = (BarColumn(), TaskProgressColumn(), MofNCompleteColumn(), TimeElapsedColumn(), text)
    with Progress(*columns, console=stderr, transient=True) as progress:
        task = progress.add_task("", total=None)
        yield lambda done, total, text: progress.update(task, completed=done, total=total, description=text)


def _document(result: CampaignResult) -> dict[str, Any]:
    return {
        "profile": str(result.profile),
        "measured": result.measured,
        "left": result.left,
        "skipped": dict(result.skipped),
        "models_rel_std": dict(result.groups),
        "host_us": dict(result.host_us),
    }


def _summary(result: CampaignResult) -> RenderableType:
    from rich.console import Group

    from autosac.display.tables import Table

    lines: list[Any] = [f"profile written to {result.profile}: {result.measured} operators measured"]
    if result.left:
        lines.append(f"{result.left} operators were left when the time ran out; --resume measures them")
    if result.host_us:
        lines.append(
            "host: " + ", ".join(f"{name.removesuffix('_us')} {us:.2f} us" for name, us in result.host_us.items())
        )
    table = Table(title="Fitted models (leave-one-out error of one operator)", title_justify="left")
    table.add_column("operators")
    table.add_column("error", justify="right")
    for name, std in sorted(result.groups.items()):
        table.add_row(name, f"{std * 100:.1f} %")
    lines.append(table)
    if result.skipped:
        lines.append(f"{len(result.skipped)} operators were skipped:")
        lines += [f"- {name}: {why}" for name, why in result.skipped.items()]
    return Group(*lines)
