"""The command line: ``autosac plan | simulate | explain | diff | bench | calibrate | gpus | clusters | cache | completion``.

One parser; errors are printed in one place, on one line of standard error. Exit codes: 0 done, 1 the job cannot be done
(no plan fits, it cannot be captured), 2 wrong usage (arguments, files, settings), 128 + N stopped by signal N (130: Ctrl-C,
143: SIGTERM). A signal leaves neither processes nor temporary files.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import NoReturn

from autosac.cli.bench import add_bench
from autosac.cli.calibrate import add_calibrate
from autosac.cli.options import (
    MOST_BUDGETS,
    MOST_DRAWS,
    MOST_GPUS,
    add_output,
    decimal,
    filled,
    filled_path,
    whole,
)
from autosac.cli.tool_options import add_cache, add_clusters, add_completion, add_gpus
from autosac.errors import AutosacError, UsageError
from autosac.report.printable import printable

SOLVERS = ("pareto", "ilp", "greedy", "knapsack")


class _Parser(argparse.ArgumentParser):
    """argparse prints its usage before an error; one line is enough."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message} (see {self.prog} --help)")


def build_parser() -> argparse.ArgumentParser:
    """The whole command line."""
    parser = _Parser(
        prog="autosac",
        description="Plans selective activation checkpointing for PyTorch training jobs, without a GPU.",
    )
    parser.add_argument("--version", action="version", version=f"autosac {_version()}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND", parser_class=_Parser)
    _add_plan(commands)
    _add_simulate(commands)
    _add_explain(commands)
    _add_diff(commands)
    add_bench(commands)
    add_calibrate(commands)
    add_gpus(commands)
    add_clusters(commands)
    add_cache(commands)
    add_completion(commands)
    return parser


def _version() -> str:
    try:
        return version("autosac")
    except PackageNotFoundError:  # run from a checkout
        return "(not installed)"


def _add_job(command: argparse.ArgumentParser) -> None:
    command.epilog = "TorchTitan's own arguments may follow after --, e.g. -- --training.seq_len 4096"
    job = command.add_argument_group("the job")
    job.add_argument(
        "job",
        type=filled,
        metavar="JOB",
        help="a TorchTitan job: its file (0.2), or MODULE:CONFIG (0.3); simulate: or a saved capture",
    )
    job.add_argument(
        "--world-size", type=whole(1, MOST_GPUS), default=None, metavar="N", help="number of GPUs (default: $NGPU or 1)"
    )
    job.add_argument(
        "--rank",
        type=whole(0, MOST_GPUS - 1),
        default=None,
        metavar="R",
        help="look at this rank only (default: one of every pipeline stage)",
    )
    job.add_argument("--no-cache", action="store_true", help="capture again, also what is kept from earlier runs")
    machine = command.add_argument_group("the machine")
    machine.add_argument(
        "--gpu", type=filled, required=True, help="a GPU by name (h100-sxm-80gb, ...) or a profile file"
    )
    machine.add_argument(
        "--cluster", type=filled, help="a cluster by name (hgx-h100, ...) or file; default: as the GPU usually comes"
    )
    machine.add_argument(
        "--alloc-conf",
        metavar="CONF",
        default=None,
        help="PYTORCH_CUDA_ALLOC_CONF of the job (default: expandable_segments:True, as TorchTitan's launcher sets)",
    )
    load = command.add_argument_group("the load of experts (mixtures of experts)")
    load.add_argument(
        "--moe-load",
        default="balanced",
        metavar="LOAD",
        help="how tokens spread over experts: balanced (default), uniform, power-law[:ALPHA] or zipf[:S]",
    )
    load.add_argument(
        "--moe-seed", type=whole(0, 2**32 - 1), default=0, metavar="N", help="seed of the draws (default 0)"
    )
    load.add_argument(
        "--moe-draws",
        type=whole(1, MOST_DRAWS),
        default=None,
        metavar="N",
        help="how many draws to look at (default 8)",
    )
    _add_output(command)


def _add_output(command: argparse.ArgumentParser) -> None:
    add_output(command, debug="show tracebacks and the capture process's log")


def _add_plan(commands: argparse._SubParsersAction[_Parser]) -> None:
    command = commands.add_parser("plan", help="decide what to keep and what to recompute under a memory budget")
    _add_job(command)
    decision = command.add_argument_group("the decision")
    decision.add_argument("--budget", default="85%", help="memory a GPU may use: 68GiB, 73GB, 85%% (default 85%%)")
    decision.add_argument(
        "--budgets", metavar="A,B,...", help="several budgets in one go: 40GiB,45GiB,50GiB (instead of --budget)"
    )
    decision.add_argument(
        "--pareto",
        type=whole(2, MOST_BUDGETS),
        metavar="N",
        help="N budgets from the least that will do to no checkpointing",
    )
    decision.add_argument(
        "--pareto-html", type=filled_path, metavar="FILE", help="the curve as a page (with --budgets or --pareto)"
    )
    decision.add_argument("--pareto-png", type=filled_path, metavar="FILE", help="the curve as a picture")
    decision.add_argument(
        "--budget-kind",
        choices=("reserved", "active"),
        default="reserved",
        help="what the budget bounds: what the caching allocator reserves (default), or what tensors occupy",
    )
    decision.add_argument(
        "--confidence",
        type=decimal,
        metavar="P",
        help="probability with which the plan has to fit, for example 0.99: keeps a margin for errors of the prediction",
    )
    decision.add_argument(
        "--maximize", choices=("tokens-per-second",), help="choose the local batch size too, that which trains fastest"
    )
    decision.add_argument(
        "--batch-sizes", metavar="A,B,...", help="the local batch sizes to choose from (with --maximize)"
    )
    decision.add_argument(
        "--offload", action="store_true", help="results may wait in host memory, where that makes the step shorter"
    )
    decision.add_argument(
        "--solver",
        choices=SOLVERS,
        default="pareto",
        help="local solver (default pareto; greedy and knapsack decide as if all that is not kept ran again)",
    )
    decision.add_argument("--milp", choices=("cbc", "highs"), default="cbc", help="MILP backend (default cbc)")
    decision.add_argument(
        "--time-limit", type=decimal, default=30.0, metavar="S", help="of the MILP, in seconds (default 30)"
    )
    decision.add_argument(
        "--gap", type=decimal, default=5e-3, help="relative gap at which the MILP stops (default 0.005)"
    )
    decision.add_argument(
        "-o",
        "--output",
        type=filled_path,
        default=None,
        metavar="PLAN.json",
        help="write the plan here (several: plan-40GiB.json, ...)",
    )
    decision.set_defaults(run="plan")


def _add_simulate(commands: argparse._SubParsersAction[_Parser]) -> None:
    command = commands.add_parser("simulate", help="predict step time, peak memory and out-of-memory")
    _add_job(command)
    what = command.add_argument_group("what to simulate")
    policy = what.add_mutually_exclusive_group()
    policy.add_argument("--plan", type=filled_path, metavar="PLAN.json", help="the job under this plan")
    policy.add_argument(
        "--ac",
        type=filled,
        metavar="MODE",
        help="none, full, selective-op or selective-N in place of the job's own checkpointing",
    )
    what.add_argument(
        "--time", action="store_true", help="show what the step time consists of: cost models, modules, critical path"
    )
    what.add_argument(
        "--interference",
        choices=("on", "off"),
        default="on",
        help="whether computation and communication slow each other down where they overlap (default on)",
    )
    what.add_argument(
        "--collectives",
        choices=("fitted", "alpha-beta", "chunks"),
        default="fitted",
        help="cost model of collectives: fitted to measurements (default), latency and bandwidth, or NCCL's chunks",
    )
    what.add_argument("--memory", action="store_true", help="show what the peak consists of")
    what.add_argument("--memory-html", type=filled_path, metavar="FILE", help="the memory timeline as a page")
    what.add_argument("--memory-png", type=filled_path, metavar="FILE", help="the memory timeline as a picture")
    what.add_argument(
        "--memory-snapshot",
        type=filled_path,
        metavar="FILE",
        help="a snapshot for PyTorch's own memory viewer (memory_viz)",
    )
    what.add_argument(
        "--trace", type=filled_path, metavar="FILE", help="the timeline for Perfetto (Chrome trace format)"
    )
    what.add_argument("--save-capture", type=filled_path, metavar="FILE", help="keep the captured step (a trace file)")
    command.set_defaults(run="simulate")


def _add_explain(commands: argparse._SubParsersAction[_Parser]) -> None:
    command = commands.add_parser("explain", help="show what a plan decides, and why")
    command.add_argument("plan", type=filled_path, metavar="PLAN.json")
    command.add_argument("--module", metavar="NAME", help="one module, operator by operator")
    _add_output(command)
    command.set_defaults(run="explain")


def _add_diff(commands: argparse._SubParsersAction[_Parser]) -> None:
    command = commands.add_parser("diff", help="show in what two plans differ")
    command.add_argument("a", type=filled_path, metavar="A.json")
    command.add_argument("b", type=filled_path, metavar="B.json")
    _add_output(command)
    command.set_defaults(run="diff")


class _Stopped(KeyboardInterrupt):
    """A signal asks the command to end."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.exit_code = 128 + number


@contextlib.contextmanager
def _stopped_by_signals() -> Iterator[None]:
    """SIGTERM and SIGHUP unwind the command as Ctrl-C does, so that it cleans up; meanwhile further ones do nothing.

    A signal that is ignored from the start (nohup, a shell's background job) stays so.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    numbers = [
        number for name in ("SIGINT", "SIGTERM", "SIGHUP") if (number := getattr(signal, name, None)) is not None
    ]
    before = {number: signal.getsignal(number) for number in numbers}
    caught = [number for number in numbers if before[number] is not signal.SIG_IGN]

    def stop(number: int, _: object) -> None:
        for each in caught:
            signal.signal(each, signal.SIG_IGN)
        raise _Stopped(number)

    try:
        for number in caught:
            signal.signal(number, stop)
        yield
    finally:
        for number in caught:
            signal.signal(number, before[number])


def _check_values(arguments: Sequence[str]) -> None:
    """UsageError for ``--option=--``, which argparse (before Python 3.13) takes for an option without a value and fails."""
    for argument in arguments:
        option, equals, value = argument.partition("=")
        if option.startswith("-") and equals and value == "--":
            raise UsageError(f"{option}: -- is not a value")
        if argument.startswith("-") and not argument.startswith("--") and argument.endswith("--"):
            raise UsageError(f"{argument[:-2]}: -- is not a value")


def _complain(message: str) -> None:
    """One line of standard error, whatever names and files put into the message."""
    short = re.sub(r"\S{200,}", lambda word: f"{word[0][:80]}...{word[0][-20:]}", printable(message))
    print(f"autosac: {short}", file=sys.stderr)


def _forget_output() -> None:
    """What could not be printed is not tried again when the interpreter ends."""
    with contextlib.suppress(OSError, ValueError):
        sys.stdout.flush()
        return
    with contextlib.suppress(OSError, ValueError, AttributeError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line. Returns the exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    overrides: list[str] = []
    if "--" in arguments:
        split = arguments.index("--")
        arguments, overrides = arguments[:split], arguments[split + 1 :]
    debug = "--debug" in arguments
    try:
        _check_values(arguments)
        with _stopped_by_signals():
            parsed = build_parser().parse_args(arguments)
            parsed.overrides = tuple(overrides)
            if getattr(parsed, "no_cache", False):
                os.environ["AUTOSAC_CACHE"] = "off"
            from autosac.cli import commands

            commands.run(parsed)
            sys.stdout.flush()
    except AutosacError as e:
        if debug:
            raise
        _complain(str(e))
        return e.exit_code
    except BrokenPipeError:  # who reads has seen enough, as with "| head"
        _forget_output()
        return 128 + 13
    except OSError as e:
        if debug:
            raise
        _forget_output()
        _complain(f"{e.filename or 'standard output'}: {e.strerror or e}")
        return 2
    except KeyboardInterrupt as e:
        print("autosac: interrupted", file=sys.stderr)
        return getattr(e, "exit_code", 130)
    return 0


if __name__ == "__main__":
    sys.exit(main())
