"""The command line: ``autosac plan | simulate | run | explain | diff | search | bench | calibrate | ...``.

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

from autosac.choices import CURVES, LEVERS, SOLVERS
from autosac.cli.bench import add_bench
from autosac.cli.calibrate import add_calibrate
from autosac.cli.options import add_command, add_output, decimal, filled, filled_path, watts, whole
from autosac.cli.script_options import add_breakdowns, add_script
from autosac.cli.search import add_search
from autosac.cli.tool_options import add_cache, add_chakra, add_clusters, add_completion, add_gpus
from autosac.display.printable import printable
from autosac.errors import AutosacError, UsageError
from autosac.limits import MOST_BUDGETS, MOST_DRAWS, MOST_GPUS


class _Parser(argparse.ArgumentParser):
    """argparse prints its usage before an error; one line is enough."""

    def error(self, message: str) -> NoReturn:
        others = "; arguments for TorchTitan or a script go after --" if message.startswith("unrecognized") else ""
        raise UsageError(f"{message} (see {self.prog} --help{others})")


def build_parser() -> argparse.ArgumentParser:
    """The whole command line."""
    parser = _Parser(
        prog="autosac",
        description="Plan selective activation checkpointing for PyTorch training jobs. No GPU is needed.",
    )
    parser.add_argument("--version", action="version", version=f"autosac {_version()}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND", parser_class=_Parser)
    _add_plan(commands)
    _add_simulate(commands)
    add_script(commands)
    _add_explain(commands)
    _add_diff(commands)
    add_search(commands)
    add_bench(commands)
    add_calibrate(commands)
    add_chakra(commands)
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
    command.epilog = "Arguments after -- go to TorchTitan. Example: -- --training.seq_len 4096"
    job = command.add_argument_group("the job")
    job.add_argument(
        "job",
        type=filled,
        metavar="JOB",
        help="TorchTitan job: a job file (0.2) or MODULE:CONFIG (0.3); simulate also takes a saved capture",
    )
    job.add_argument(
        "--world-size",
        type=whole(1, MOST_GPUS),
        default=None,
        metavar="N",
        help="number of GPUs (default: $NGPU, else 1)",
    )
    job.add_argument(
        "--rank",
        type=whole(0, MOST_GPUS - 1),
        default=None,
        metavar="R",
        help="simulate only this rank (default: one rank of every pipeline stage)",
    )
    job.add_argument("--no-cache", action="store_true", help="ignore the capture cache")
    _add_machine(command.add_argument_group("the machine"))
    _add_load(command.add_argument_group("expert load imbalance (mixture of experts)"))
    _add_output(command)


def _add_machine(machine: argparse._ArgumentGroup) -> None:
    machine.add_argument(
        "--gpu", type=filled, required=True, help="GPU name (such as h100-sxm-80gb; see autosac gpus) or profile file"
    )
    machine.add_argument(
        "--cluster",
        type=filled,
        help="cluster name (such as hgx-h100; see autosac clusters) or file (default: the usual cluster of the GPU)",
    )
    machine.add_argument(
        "--power-limit",
        type=watts,
        metavar="WATTS",
        default=None,
        help="power cap of each GPU, such as 500W (default: the profile's, if it has one)",
    )
    machine.add_argument(
        "--alloc-conf",
        metavar="CONF",
        default=None,
        help="PYTORCH_CUDA_ALLOC_CONF of the job (default: expandable_segments:True, as in TorchTitan's launcher)",
    )


def _add_load(load: argparse._ArgumentGroup) -> None:
    load.add_argument(
        "--moe-load",
        default="balanced",
        metavar="LOAD",
        help="distribution of tokens over experts: balanced (default), uniform, untrained, power-law[:ALPHA] or zipf[:S]",
    )
    load.add_argument("--moe-seed", type=whole(0, 2**32 - 1), default=0, metavar="N", help="random seed (default 0)")
    load.add_argument(
        "--moe-draws",
        type=whole(1, MOST_DRAWS),
        default=None,
        metavar="N",
        help="number of random loads to simulate (default 8)",
    )


def _add_output(command: argparse.ArgumentParser) -> None:
    add_output(command, debug="show tracebacks and the log of the capture process")


def _add_plan(commands: argparse._SubParsersAction[_Parser]) -> None:
    command = add_command(
        commands, "plan", "decide which activations to keep and which to recompute within a memory budget"
    )
    _add_job(command)
    _add_budget(command.add_argument_group("the memory budget"))
    decision = command.add_argument_group("the decision")
    _add_levers(decision)
    _add_solvers(decision)
    decision.add_argument(
        "-o",
        "--output",
        type=filled_path,
        default=None,
        metavar="PLAN.json",
        help="file for the plan; several plans become PLAN-40GiB.json, ...",
    )
    decision.set_defaults(run="plan")


def _add_levers(decision: argparse._ArgumentGroup) -> None:
    decision.add_argument(
        "--maximize", choices=("tokens-per-second",), help="also choose the local batch size that trains fastest"
    )
    decision.add_argument(
        "--batch-sizes", metavar="A,B,...", help="local batch sizes to choose from (needs --maximize)"
    )
    decision.add_argument(
        "--offload",
        action="store_true",
        help="allow offloading activations to host memory where that makes the step shorter",
    )
    decision.add_argument(
        "--chunk-loss",
        action="store_true",
        help="allow computing the loss in chunks of rows (another order of summation) where that makes the step shorter",
    )
    decision.add_argument(
        "--levers",
        choices=LEVERS,
        default="off",
        help="simulate what else would make the step faster under the budget: quick (the loss in chunks, a smaller local "
        "batch), all (every setting that does not change the model, and those that help combined), off (default)",
    )


def _add_solvers(decision: argparse._ArgumentGroup) -> None:
    decision.add_argument(
        "--solver",
        choices=SOLVERS,
        default="pareto",
        help="solver that chooses operators within a module (default pareto; greedy and knapsack assume that everything "
        "that is not kept runs again)",
    )
    decision.add_argument(
        "--curve",
        choices=CURVES,
        default="staircase",
        help="how the MILP models the trade-off between time and memory: the staircase's convex hull (default), or an upper "
        "bound that pwlf fits",
    )
    decision.add_argument("--milp", choices=("cbc", "highs"), default="cbc", help="MILP solver (default cbc)")
    decision.add_argument(
        "--time-limit",
        type=decimal,
        default=30.0,
        metavar="S",
        help="time limit of the MILP solver in seconds (default 30)",
    )
    decision.add_argument(
        "--gap",
        type=decimal,
        default=5e-3,
        help="relative optimality gap at which the MILP solver stops (default 0.005)",
    )


def _add_budget(budget: argparse._ArgumentGroup) -> None:
    budget.add_argument("--budget", help="memory that each GPU may use: 68GiB, 73GB or 85%% (default 85%%)")
    budget.add_argument(
        "--budgets", metavar="A,B,...", help="plan for several budgets, such as 40GiB,45GiB,50GiB (instead of --budget)"
    )
    budget.add_argument(
        "--pareto",
        type=whole(2, MOST_BUDGETS),
        metavar="N",
        help="plan for N budgets between the smallest feasible one and no checkpointing",
    )
    budget.add_argument(
        "--pareto-html",
        type=filled_path,
        metavar="FILE",
        help="draw step time against memory as a web page (needs --budgets or --pareto)",
    )
    budget.add_argument("--pareto-png", type=filled_path, metavar="FILE", help="the same as a PNG image")
    budget.add_argument(
        "--budget-kind",
        choices=("reserved", "active"),
        default="reserved",
        help="what the budget limits: memory reserved by the caching allocator (default) or active memory of tensors",
    )
    budget.add_argument(
        "--confidence",
        type=decimal,
        metavar="P",
        help="probability that the plan fits, such as 0.99; leaves a margin for prediction errors",
    )


def _add_simulate(commands: argparse._SubParsersAction[_Parser]) -> None:
    command = add_command(commands, "simulate", "predict step time, peak memory and whether the job runs out of memory")
    _add_job(command)
    what = command.add_argument_group("what to simulate")
    policy = what.add_mutually_exclusive_group()
    policy.add_argument("--plan", type=filled_path, metavar="PLAN.json", help="apply this plan to the job")
    policy.add_argument(
        "--ac",
        type=filled,
        metavar="MODE",
        help="replace the job's checkpointing with none, full, selective-op or selective-N",
    )
    add_breakdowns(what)
    what.add_argument(
        "--chakra",
        type=filled_path,
        metavar="DIR",
        help="write Chakra execution traces of the step for ASTRA-sim and others, one per rank (needs protobuf)",
    )
    command.set_defaults(run="simulate")


def _add_explain(commands: argparse._SubParsersAction[_Parser]) -> None:
    command = add_command(commands, "explain", "show the decisions of a plan and the reasons for them")
    command.add_argument("plan", type=filled_path, metavar="PLAN.json", help="the plan")
    command.add_argument("--module", metavar="NAME", help="show one module, operator by operator")
    add_output(command)
    command.set_defaults(run="explain")


def _add_diff(commands: argparse._SubParsersAction[_Parser]) -> None:
    command = add_command(commands, "diff", "compare two plans")
    command.add_argument("a", type=filled_path, metavar="A.json", help="one plan")
    command.add_argument("b", type=filled_path, metavar="B.json", help="the other plan")
    add_output(command)
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


def _open_streams() -> None:
    """What is said on a stream that the shell has closed goes nowhere; no file of ours gets its number."""
    while (number := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(number, True)
    os.close(number)
    sys.stdout = sys.stdout or open(1, "w", closefd=False)  # noqa: SIM115
    sys.stderr = sys.stderr or open(2, "w", closefd=False)  # noqa: SIM115


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line. Returns the exit code."""
    _open_streams()
    arguments = list(sys.argv[1:] if argv is None else argv)
    overrides: list[str] = []
    if "--" in arguments:
        split = arguments.index("--")
        arguments, overrides = arguments[:split], arguments[split + 1 :]
    debug = "--debug" in arguments
    try:
        _check_values(arguments)
        with _stopped_by_signals():
            parser = build_parser()
            parsed = parser.parse_args(arguments)
            parsed.parser, parsed.overrides = parser, tuple(overrides)
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
