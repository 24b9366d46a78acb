"""``autosac bench``: its options, and what it does with them."""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from autosac.cli.options import add_command, add_output, decimal, filled_path, names, whole
from autosac.files.writing import check_folder, check_outputs

if TYPE_CHECKING:
    from autosac.bench.suite import Suite


def add_bench(commands: argparse._SubParsersAction[Any]) -> None:
    """The options."""
    command = add_command(commands, "bench", "compare checkpointing policies: predicted and, if asked, measured")
    command.add_argument(
        "suite", type=filled_path, metavar="SUITE.toml", help="models, configurations, budgets and policies"
    )
    command.add_argument(
        "-o",
        "--output",
        type=filled_path,
        default=Path("bench"),
        metavar="DIR",
        help="folder for the report (default: bench)",
    )
    command.add_argument("--docs", type=filled_path, metavar="FILE.md", help="also write the tables as a Markdown page")
    part = command.add_argument_group("select a part of the suite, or override its settings")
    part.add_argument("--models", type=names, metavar="A,B", help="only these models")
    part.add_argument("--configurations", type=names, metavar="A,B", help="only these configurations")
    part.add_argument("--policies", type=names, metavar="A,B", help="use these policies")
    part.add_argument("--budgets", type=names, metavar="A,B", help="use these budgets, such as 40GiB,50GiB")
    part.add_argument("--milp", help="MILP solver: cbc or highs")
    part.add_argument("--time-limit", type=decimal, metavar="S", help="time limit of the MILP solver in seconds")
    real = command.add_argument_group("real runs (eager models)")
    real.add_argument(
        "--measure", action="store_true", help="also run every policy for real and show measurements beside predictions"
    )
    real.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="device to measure on (default cuda)")
    real.add_argument(
        "--steps", type=whole(1, 10_000), default=5, metavar="N", help="number of steps to time (default 5)"
    )
    part.add_argument("--no-cache", action="store_true", help="ignore the capture cache")
    add_output(command)
    command.set_defaults(run="bench")


def bench(arguments: argparse.Namespace) -> None:
    """Run the suite, write the report, print the table and the claims."""
    from autosac.bench.measure import Measurement, check_measurable
    from autosac.bench.report import check_pictures, write_document, write_report
    from autosac.bench.run import run_suite
    from autosac.bench.suite import load_suite
    from autosac.cli.progress import progress_line
    from autosac.report import summaries as reports

    suite = _changed(load_suite(arguments.suite), arguments)
    measurement = Measurement(device=arguments.device, steps=arguments.steps) if arguments.measure else None
    if measurement is not None:
        check_measurable(suite, measurement)
    check_pictures()
    folder: Path = arguments.output
    check_outputs([("--docs", arguments.docs)], (arguments.suite,))
    check_folder(folder)
    with progress_line(enabled=not arguments.quiet and not arguments.debug) as progress:
        results, case = run_suite(suite, folder, progress, measurement)
        written = write_report(folder, results, case)
    if arguments.docs is not None:
        write_document(arguments.docs, results, case, f"autosac bench {arguments.suite}")
    claims = [*map(str, results.claims()), *([case.claim()] if case is not None else [])]
    if arguments.json:
        files, notes = [str(path) for path in written], list(results.notes)
        print(json.dumps({"rows": results.documents(), "claims": claims, "notes": notes, "files": files}, indent=1))
        return
    out = reports.console()
    out.print(results.summary())
    for claim in (*claims, *results.notes):
        out.print(f"- {claim}")
    out.print(f"written to {folder}: {', '.join(path.name for path in written)}", soft_wrap=True)


def _changed(suite: Suite, arguments: argparse.Namespace) -> Suite:
    """The suite with what the options change of it."""
    from autosac.bench.policies import Policy

    suite = suite.pick(arguments.models or (), arguments.configurations or ())
    changes: dict[str, Any] = {"use_cache": not arguments.no_cache}
    if arguments.policies is not None:
        changes["policies"] = tuple(Policy(name) for name in arguments.policies)
    if arguments.budgets is not None:
        changes["budgets"] = arguments.budgets
    if arguments.milp is not None:
        changes["milp"] = arguments.milp
    if arguments.time_limit is not None:
        changes["time_limit_s"] = arguments.time_limit
    return replace(suite, **changes)
