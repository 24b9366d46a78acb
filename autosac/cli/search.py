"""``autosac search``: its options, and what it does with them."""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from autosac.cli.options import add_output, decimal, filled, filled_path, whole
from autosac.errors import InfeasibleError, UsageError
from autosac.files.writing import check_outputs
from autosac.limits import MOST_BATCH, MOST_GPUS, world_size_of_environment
from autosac.quantities import format_bytes

if TYPE_CHECKING:
    from autosac.configurations.results import SearchResult
    from autosac.configurations.sessions import Inputs

_MOST_WORKERS = 1024


def add_search(commands: argparse._SubParsersAction[Any]) -> None:
    """The options."""
    command = commands.add_parser(
        "search", help="find the fastest configuration of a job: parallelism, batch, checkpointing, FSDP"
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
        "--price", type=filled, action="append", default=[], metavar="NAME=PRICE", help="price of one GPU for an hour"
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
    space.add_argument("--space", type=filled_path, metavar="SPACE.toml", help="knobs and their values")
    space.add_argument("--show-space", action="store_true", help="print the space and exit")
    space.add_argument(
        "--global-batch",
        type=whole(1, MOST_BATCH * MOST_GPUS),
        metavar="N",
        help="sequences in a step on all GPUs (default: the job's own)",
    )
    space.add_argument(
        "--objective",
        choices=("tokens-per-second", "cost-per-token"),
        default="tokens-per-second",
        help="what to optimize (default tokens-per-second; cost-per-token needs --price)",
    )
    space.add_argument(
        "--budget", default="85%", help="memory that each GPU may reserve: 68GiB, 73GB or 85%% (default 85%%)"
    )
    space.add_argument(
        "--confidence",
        type=decimal,
        metavar="P",
        help="probability of fitting, such as 0.99; leaves a margin for errors",
    )
    space.add_argument(
        "--gap",
        type=decimal,
        default=0.005,
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
        "--workers", type=whole(1, _MOST_WORKERS), metavar="N", help="processes (default: one for each processor)"
    )
    study.add_argument(
        "--ray", type=filled, metavar="ADDRESS", help="evaluate on a Ray cluster (auto: the running one)"
    )
    study.add_argument("--no-cache", action="store_true", help="ignore the capture cache")


def search(arguments: argparse.Namespace) -> None:
    """Search, write the best job, print the table. Interrupted, the best so far."""
    from autosac.cli.progress import progress_line
    from autosac.configurations.python_files import check_python_file
    from autosac.configurations.sessions import searching
    from autosac.titan.version import has_python_jobs

    if arguments.show_space:
        _show_space(arguments)
        return
    inputs = _inputs(arguments)
    if arguments.output is not None and has_python_jobs():
        check_python_file(arguments.output)
    check_outputs((("-o", arguments.output), ("--html", arguments.search_html)), (Path(inputs.config_file),))
    with progress_line(enabled=not arguments.quiet and not arguments.debug) as progress:
        with searching(inputs, progress) as found:
            try:
                result = found.run()
            except KeyboardInterrupt:
                result = found.result()
                _report(arguments, inputs, result)
                hint = f"the same command with --resume {inputs.study} continues"
                print(f"autosac: {hint}", file=sys.stderr, flush=True)
                raise
    _report(arguments, inputs, result)
    if result.best is None:
        raise InfeasibleError(_nothing_fits(result))


def _show_space(arguments: argparse.Namespace) -> None:
    from autosac.configurations.space import Space, load_space, space_text

    print(space_text(load_space(arguments.space) if arguments.space else Space()), end="")


def _inputs(arguments: argparse.Namespace) -> Inputs:
    from autosac.configurations.offers import Offer, offers_of
    from autosac.configurations.sessions import Inputs
    from autosac.configurations.space import Space, load_space

    if arguments.job is None:
        raise UsageError("a search needs a job (see autosac search --help)")
    if bool(arguments.gpu) == bool(arguments.gpus):
        raise UsageError("give --gpu with --world-size, or --gpus (one of them)")
    if arguments.gpus is not None:
        if arguments.world_size is not None or arguments.cluster is not None:
            raise UsageError(
                "--gpus says the numbers, and each kind has its usual cluster: leave --world-size and --cluster"
            )
        offers = offers_of(arguments.gpus, arguments.price, arguments.objective)
    else:
        world_size = arguments.world_size or world_size_of_environment()
        (named,) = offers_of(f"{arguments.gpu}:{world_size}", arguments.price, arguments.objective)
        offers = (Offer(gpu=named.gpu, world_size=world_size, cluster=arguments.cluster, price=named.price),)
    if arguments.study is not None and arguments.resume is not None:
        raise UsageError("give --study or --resume, not both")
    study = arguments.resume or arguments.study or Path(f"{Path(arguments.job).stem.rpartition(':')[2]}.search")
    return Inputs(
        config_file=arguments.job,
        offers=offers,
        overrides=arguments.overrides,
        space=load_space(arguments.space) if arguments.space is not None else Space(),
        budget=arguments.budget,
        confidence=arguments.confidence,
        objective=arguments.objective,
        global_batch=arguments.global_batch,
        gap=arguments.gap,
        study=study,
        resume=arguments.resume is not None,
        workers=arguments.workers or os.cpu_count() or 1,
        ray=arguments.ray,
        use_cache=not arguments.no_cache,
    )


def _report(arguments: argparse.Namespace, inputs: Inputs, result: SearchResult) -> None:
    """Write the best job and print what was found."""
    from autosac.configurations.best_files import write_best
    from autosac.report import summaries as reports
    from autosac.report.search_tables import search_document, search_summary

    written = write_best(arguments.output, inputs, result) if arguments.output is not None else []
    if arguments.search_html is not None and result.rows:
        from autosac.report.search_pictures import search_html

        search_html(arguments.search_html, result)
        written.append(arguments.search_html)
    if arguments.json:
        print(json.dumps({**search_document(result), "files": [str(path) for path in written]}, indent=1))
        return
    out = reports.console()
    out.print(search_summary(result))
    if written:
        out.print(f"written: {', '.join(map(str, written))}", soft_wrap=True)


def _nothing_fits(result: SearchResult) -> str:
    if result.rows:
        row = min(result.rows, key=lambda row: row.measured.peak_reserved_bytes)
        least = f"the least that was simulated needs {format_bytes(row.measured.peak_reserved_bytes)} ({row.name})"
    else:
        least = "lower bounds of memory rule all of them out"
    return f"no configuration of the space fits {format_bytes(result.budget_bytes)}: {least}; more GPUs, or a wider --space"
