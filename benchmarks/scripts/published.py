"""Published steps of scripts outside TorchTitan, beside what `autosac run` says of scripts that do the same.

    python -m benchmarks.scripts.published (--truth DIR | --unseen | --page llama|mpt) [--case E0266 ...]
        [--full-precision]

DIR holds ``other_published.csv``: Llama-3.2-1B of Hugging Face with cuDNN's attention (`llama_attention.py`), and MPTs under
the first FSDP (`mpt_fsdp1.py`). ``--unseen``: other rows of MPT's page (``unseen_mpt.csv``), chosen by
size, length and GPU before any was simulated. ``--page``: all rows of a page that docs/scripts.md speaks of
(``llama_page.csv``, ``mpt_page.csv``). ``--full-precision``: as if Composer had left MPT's parameters in
float32 on up to 64 GPUs. Rank 0 runs. Clocks are locked where a row says so.

Llama's page ran cuDNN 9.9 of May 2025, whose attention on a B200 takes 1.96 times as long as today's (heads of 64, 1,665 MHz).
That was fitted to the page's rows of 1,024, 4,096 and 16,384 positions; its other lengths are held out.
"""

from __future__ import annotations

import argparse
import csv
import re
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from autosac.errors import AutosacError
from autosac.scripts.launch import run_script
from autosac.scripts.request import ScriptRequest
from autosac.scripts.target import script_target
from autosac.simulation import Simulation, simulation_of
from autosac.trace import Op, Trace
from benchmarks.truth import truth_folder

FOLDER = Path(__file__).parent
UNSEEN = FOLDER / "unseen_mpt.csv"
HEADING = (
    "| run | model | GPUs | batch | measured (ms) | simulated (ms) | error | peak reserved (GiB) |\n"
    "|---|---|---|---:|---:|---:|---:|---:|"
)
_GPUS = {
    "h200": "h200-sxm-141gb",
    "b200": "b200-sxm-180gb",
    "h100": "h100-sxm-80gb",
    "a100_40gb": "a100-sxm-40gb",
    "a100": "a100-sxm-80gb",
}
_WIDTHS = {  # layers, width
    "MPT-125m": ("12", "768"),
    "MPT-350m": ("24", "1024"),
    "MPT-760m": ("24", "1536"),
    "MPT-1b": ("24", "2048"),
    "MPT-3b": ("32", "2560"),
    "MPT-7b": ("32", "4096"),
    "MPT-13b": ("40", "5120"),
    "MPT-30b": ("48", "7168"),
    "MPT-70b": ("80", "8192"),
}
_LOCKED = re.compile(r"locked (\d+)MHz")
_BACKEND = re.compile(r"SDPA backend=(\w+)")
_NARROW_HEADS = ("MPT-125m", "MPT-350m")  # of 64
_NODE = 8
_CUDNN_9_9 = {"b200-sxm-180gb": 1.96}  # its attention's time, relative to today's
_CUDNN_ATTENTION = "aten._scaled_dot_product_cudnn_attention"
_LARGE = 128  # GPUs from which the page has a sweep with settings of its own
_TRITON_AT_LARGE = ("MPT-13b", "MPT-30b")  # whose attention is Triton's there, too


@dataclass(frozen=True, slots=True, kw_only=True)
class Published:
    """A published run: its row, and the request that runs the same as a script."""

    case: str
    model: str
    hardware: str
    batch: str
    step_ms: float
    request: ScriptRequest
    locked_mhz: float


def read_published(path: Path) -> list[Published]:
    """The runs of a file like ``other_published.csv``."""
    with path.open(newline="") as file:
        return [published_run(row) for row in csv.DictReader(file)]


def published_run(row: dict[str, str]) -> Published:
    gpus = int(row["n_gpus"])
    name = next(name for key, name in _GPUS.items() if key in row["hardware"].lower())
    script, arguments = _script(row)
    request = ScriptRequest(
        script=str(FOLDER / script),
        arguments=arguments,
        gpu=name,
        nproc=min(gpus, _NODE) if gpus > 1 else None,
        nodes=max(1, gpus // _NODE),
        stand_ins=("flash_attn",) if script.startswith("mpt") else (),
        unlimited=True,
        quiet=True,
    )
    return Published(
        case=row["case_id"],
        model=row["model"],
        hardware=row["hardware"],
        batch=f"{row['local_batch']} x {row['seq_len']}",
        step_ms=_step_ms(row),
        request=request,
        locked_mhz=float(clock[1]) if (clock := _LOCKED.search(row["hardware"])) else 0.0,
    )


def _step_ms(row: dict[str, str]) -> float:
    if row.get("step_time_s"):
        return 1e3 * float(row["step_time_s"])
    tokens = int(row["global_batch"]) * int(row["seq_len"]) / int(row["n_gpus"])
    return 1e3 * tokens / float(row["tokens_per_s_per_gpu"])


def _script(row: dict[str, str]) -> tuple[str, tuple[str, ...]]:
    """The script of a row, and its arguments."""
    sizes = ("--batch", row["local_batch"], "--length", row["seq_len"])
    if row["model"] not in _WIDTHS:
        backend = _BACKEND.search(row["notes"])
        return "llama_attention.py", (*sizes, "--backend", backend[1]) if backend else sizes
    layers, width = _WIDTHS[row["model"]]
    accumulation = int(row["global_batch"]) // (int(row["local_batch"]) * int(row["n_gpus"]))
    shape = ("--layers", layers, "--width", width, "--accumulation", str(accumulation))
    heads = ("--head", "64") if row["model"] in _NARROW_HEADS else ()
    return "mpt_fsdp1.py", (*sizes, *shape, *heads, *_settings(row))


def _settings(row: dict[str, str]) -> tuple[str, ...]:
    """As the page's sweeps set them: one for up to 64 GPUs, with Composer's defaults of that time, one for more."""
    large = int(row["n_gpus"]) >= _LARGE
    triton = not large or row["model"] in _TRITON_AT_LARGE
    kernels = ("--attention", "triton" if triton else "flash", "--prefetch", "pre" if large else "post")
    reduction = ("--float32-reduction",) if large else ()
    sharding = ("--keep-gathered",) if row.get("schedule") == "SHARD_GRAD_OP" else ()
    return (*kernels, *reduction, *sharding, *(("--checkpointing",) if row["ac_mode"] == "full" else ()))


def line(published: Published) -> tuple[str, float | None]:
    """One run as a line of the table, and the error of its step in percent (None if it cannot be simulated)."""
    start = f"| {published.case} | {published.model} | {published.hardware} x {published.request.world_size} "
    start += f"| {published.batch} | {published.step_ms:,.1f} "
    try:
        target = script_target(published.request)
        target = replace(target, hardware=replace(target.hardware, locked_mhz=published.locked_mhz))
        found = of_its_time(simulation_of(run_script(published.request).trace, target))
    except AutosacError as e:
        return f"{start}| {e} | | |", None
    error = 100 * (found.step_ms / published.step_ms - 1)
    return f"{start}| {found.step_ms:,.1f} | {error:+.1f} % | {found.peak_reserved_bytes / 2**30:.2f} |", error


def of_its_time(simulation: Simulation) -> Simulation:
    """With the attention of the cuDNN that Llama's page ran; MPTs have other kernels."""
    factor = _CUDNN_9_9.get(simulation.target.hardware.name, 1.0)
    event_ms = simulation.pricing.event_ms * np.where(_is_cudnns(simulation.trace), factor, 1.0)
    return replace(simulation, other_prices=replace(simulation.pricing, event_ms=event_ms))


def _is_cudnns(trace: Trace) -> NDArray[np.bool_]:
    """By event, whether it is cuDNN's attention."""
    signatures = [trace.signatures[event.signature].name if type(event) is Op else "" for event in trace.events]
    return np.array([name.startswith(_CUDNN_ATTENTION) for name in signatures])


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--truth", type=truth_folder("truth"), help="folder of the published figures (CSV)")
    source.add_argument("--unseen", action="store_true", help="other rows of MPT's page")
    source.add_argument("--page", choices=("llama", "mpt"), help="all rows of a page of published steps")
    parser.add_argument("--case", action="append", help="only this run (may be repeated)")
    parser.add_argument("--full-precision", action="store_true", help="MPTs whose parameters FSDP gathers in float32")
    options = parser.parse_args()
    print(HEADING)
    errors: dict[str, list[float]] = {}
    page = FOLDER / f"{options.page}_page.csv" if options.page else UNSEEN
    for published in read_published(options.truth / "other_published.csv" if options.truth else page):
        if options.case and published.case not in options.case:
            continue
        if options.full_precision and published.model in _WIDTHS and published.request.world_size < _LARGE:
            arguments = (*published.request.arguments, "--full-precision")
            published = replace(published, request=replace(published.request, arguments=arguments))
        text, error = line(published)
        print(text, flush=True)
        if error is not None:
            errors.setdefault(published.request.gpu, []).append(error)
    for gpu, found in errors.items():
        absolute = sum(map(abs, found)) / len(found)
        print(f"{gpu}: mean error {absolute:.1f} %, on average {sum(found) / len(found):+.1f} % ({len(found)} runs)")


if __name__ == "__main__":
    main()
