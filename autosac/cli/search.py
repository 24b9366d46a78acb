"""``autosac search``: its options, and what it does with them."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from autosac.capture.processors import available_processors
from autosac.cli.options import add_command, add_output, decimal, filled, filled_path, whole
from autosac.errors import InfeasibleError, UsageError
from autosac.limits import MOST_BATCH, MOST_GPUS, world_size_of_environment
from autosac.quantities import format_bytes

if TYPE_CHECKING:
    from autosac.configurations.found.results import SearchResult
    from autosac.configurations.space.offers import Offer
    from autosac.configurations.space.request import SearchRequest

_MOST_WORKERS = 1024
# Options that are a request's values as they are; those that are not given have its defaults.
_AS_THEY_ARE = ("overrides", "budget", "confidence", "objective", "global_batch", "gap", "ray", "output")


def add_search(commands: argparse._SubParsersAction[Any]) -> None:
    """The options."""
    command = add_command(
        commands, "search", "find the fastest configuration of a job: parallelism, batch, checkpointing, FSDP"
    )
    command.epilog = "Arguments after -- go to TorchTitan. Example: -- --training.seq_len 4096"
    command.add_argument(
        "job", type=filled, metavar="JOB", nargs="?", help="TorchTitan job file (0.2) or MODULE:CONFIG (0.3)"
    )
    machine = command.add_argument_group("the GPUs")
    machine.add_argument(
        "--gpu", type=filled, help="GPU name (such as h100-sxm-80gb; see autosac gpus) or profile file"
    )
    machine.add_argument(
        "--world-size",
        type=whole(1, MOST_GPUS),
        metavar="N",
        help="number of GPUs (default: $NGPU, else 1)",
    )
    machine.add_argument("--cluster", type=filled, help="cluster name or file (default: the usual cluster of the GPU)")
    machine.add_argument(
        "--gpus", type=filled, metavar="NAME:N,...", help="choose among several kinds of GPUs, instead of --gpu"
    )
    machine.add_argument(
        "--price", type=filled, action="append", default=[], metavar="NAME=PRICE", help="price of one GPU per hour"
    )
    _add_space(command)
    _add_study(command)
    command.add_argument(
        "-o",
        "--output",
        type=filled_path,
        metavar="BEST.toml",
        help="file for the best configuration, with its plan beside it (TorchTitan 0.3: BEST.py)",
    )
    command.add_argument(
        "--html", dest="search_html", type=filled_path, metavar="FILE", help="draw the study as a web page"
    )
    add_output(command)
    command.set_defaults(run="search")


def _add_space(command: argparse.ArgumentParser) -> None:
    space = command.add_argument_group("what to search for")
    space.add_argument(
        "--space",
        type=filled_path,
        metavar="SPACE.toml",
        help="file with the values to try for each knob (default: the space that --show-space prints)",
    )
    space.add_argument(
        "--show-space", action="store_true", help="print the space, with the meaning of each knob, and exit"
    )
    space.add_argument(
        "--global-batch",
        type=whole(1, MOST_BATCH * MOST_GPUS),
        metavar="N",
        help="sequences in a step on all GPUs (default: the job's own)",
    )
    space.add_argument(
        "--objective",
        choices=("tokens-per-second", "cost-per-token"),
        help="what to optimize (default tokens-per-second; cost-per-token needs --price)",
    )
    space.add_argument("--budget", help="memory that each GPU may reserve: 68GiB, 73GB or 85%% (default 85%%)")
    space.add_argument(
        "--confidence",
        type=decimal,
        metavar="P",
        help="probability of fitting, such as 0.99; leaves a margin for errors",
    )
    space.add_argument(
        "--gap",
        type=decimal,
        help="stop when no configuration can be better by more than this share (default 0.005; 0 for the exact best)",
    )


def _add_study(command: argparse.ArgumentParser) -> None:
    study = command.add_argument_group("evaluations")
    study.add_argument(
        "--study",
        type=filled_path,
        metavar="DIR",
        help="folder for the study, which can be resumed (default: JOB.search)",
    )
    study.add_argument("--resume", type=filled_path, metavar="DIR", help="resume the search in this folder")
    study.add_argument(
        "--workers",
        type=whole(1, _MOST_WORKERS),
        metavar="N",
        help="worker processes (default: one for each processor)",
    )
    study.add_argument(
        "--ray", type=filled, metavar="ADDRESS", help="evaluate on a Ray cluster (auto: the running one)"
    )
    study.add_argument("--no-cache", action="store_true", help="ignore the capture cache")


def search(arguments: argparse.Namespace) -> None:
    """Search, write the best job, print the table. Interrupted, the best so far."""
    from autosac.cli.progress import progress_line
    from autosac.report.search_files import completed_search

    if arguments.show_space:
        _show_space(arguments)
        return
    request = requested(arguments)

    def interrupted(result: SearchResult, files: Sequence[Path]) -> None:
        _print(arguments, result, files)
        hint = f"the same command with --resume {request.study} continues"
        print(f"autosac: {hint}", file=sys.stderr, flush=True)

    with progress_line(enabled=not arguments.quiet and not arguments.debug) as progress:
        read = [arguments.space] if arguments.space is not None else []
        result, files = completed_search(request, progress, interrupted, read)
    _print(arguments, result, files)
    if result.best is None:
        raise InfeasibleError(_nothing_fits(result))


def _show_space(arguments: argparse.Namespace) -> None:
    from autosac.configurations.space.space import Space, load_space, space_text

    print(space_text(load_space(arguments.space) if arguments.space else Space()), end="")


def requested(arguments: argparse.Namespace) -> SearchRequest:
    from autosac.configurations.space.request import SearchRequest
    from autosac.configurations.space.space import load_space

    if arguments.job is None:
        raise UsageError("a search needs a job (see autosac search --help)")
    if arguments.study is not None and arguments.resume is not None:
        raise UsageError("give --study or --resume, not both")
    asked = {
        "space": load_space(arguments.space) if arguments.space is not None else None,
        **{name: getattr(arguments, name) for name in _AS_THEY_ARE},
    }
    return SearchRequest(
        job=arguments.job,
        offers=_offers(arguments),
        study=arguments.resume or arguments.study or Path(f"{Path(arguments.job).stem.rpartition(':')[2]}.search"),
        resume=arguments.resume is not None,
        workers=arguments.workers or available_processors(),
        use_cache=not arguments.no_cache,
        html=arguments.search_html,
        **{name: value for name, value in asked.items() if value is not None},
    )


def _offers(arguments: argparse.Namespace) -> tuple[Offer, ...]:
    from autosac.configurations.space.offers import offers_of

    if bool(arguments.gpu) == bool(arguments.gpus):
        raise UsageError("give --gpu with --world-size, or --gpus (one of them)")
    if arguments.gpus is None:
        world_size = arguments.world_size or world_size_of_environment()
        (named,) = offers_of(f"{arguments.gpu}:{world_size}", arguments.price)
        return (replace(named, cluster=arguments.cluster),)
    if arguments.world_size is not None or arguments.cluster is not None:
        raise UsageError(
            "--gpus gives the number of GPUs of each kind, on its usual cluster: leave out --world-size and --cluster"
        )
    return offers_of(arguments.gpus, arguments.price)


def _print(arguments: argparse.Namespace, result: SearchResult, files: Sequence[Path]) -> None:
    """Print what was found."""
    from autosac.report import summaries as reports
    from autosac.report.search_tables import search_document, search_summary

    if arguments.json:
        print(json.dumps({**search_document(result), "files": [str(path) for path in files]}, indent=1))
        return
    out = reports.console()
    out.print(search_summary(result))
    if files:
        out.print(f"written: {', '.join(map(str, files))}", soft_wrap=True)
    if files and arguments.output is not None and result.best is not None and result.best.layout.allocator:
        # which no job file can say
        out.print(f"run it with PYTORCH_CUDA_ALLOC_CONF={result.best.layout.allocator}", soft_wrap=True)


def _nothing_fits(result: SearchResult) -> str:
    from autosac.report.search_tables import budget_text, row_name, sure_text

    if result.refused and not result.rows and len(result.refused) == result.counts.legal:
        return f"no configuration of the space can run: {next(iter(result.refused.values()))}"
    if result.rows:
        row = min(result.rows, key=lambda row: row.measured.peak_reserved_bytes)
        size = format_bytes(row.measured.peak_reserved_bytes)
        least = f"the least that was simulated needs {size} ({row_name(result, row)})"
    else:
        least = "lower bounds of memory rule all of them out"
    sure = sure_text(result)
    within = f"{budget_text(result)} {sure}".rstrip()
    ways = "more GPUs, a lower --confidence, or a wider --space" if sure else "more GPUs, or a wider --space"
    return f"no configuration of the space fits {within}: {least}; {ways}"
