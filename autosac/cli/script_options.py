"""The options of ``autosac run``, and those that it has in common with ``autosac simulate``. Imports nothing heavy."""

from __future__ import annotations

import argparse
from typing import Any

from autosac.cli.options import add_command, add_output, decimal, filled, filled_path, whole
from autosac.limits import MOST_GPUS

_MOST_STEPS = 10**6


def add_script(commands: argparse._SubParsersAction[Any]) -> None:
    """The options of ``autosac run``."""
    command = add_command(commands, "run", "run an unmodified training script on a simulated GPU, with simulated time")
    command.epilog = (
        "Arguments after -- go to the script. Example: autosac run train.py --gpu h100-sxm-80gb -- --lr 1e-4"
    )
    what = command.add_argument_group("the script")
    what.add_argument("script", nargs="?", type=filled, metavar="SCRIPT", help="a Python file")
    what.add_argument("-m", "--module", type=filled, metavar="MODULE", help="a module, as after python -m")
    what.add_argument(
        "--steps",
        type=whole(0, _MOST_STEPS),
        default=None,
        metavar="N",
        help="stop the script after N steps; 0 lets it run to its end (default 3, with --fast-forward 0)",
    )
    what.add_argument(
        "--every-microbatch",
        action="store_true",
        help="run every microbatch where gradients accumulate (default: run some, and copy those that are alike)",
    )
    what.add_argument(
        "--fast-forward",
        action="store_true",
        help="run only the first steps; later steps take the same simulated time, and the script logs them at once",
    )
    what.add_argument(
        "--step-marker",
        type=filled,
        metavar="NAME",
        help="a step ends with each call of this function or Class.method (default: steps of the first optimizer)",
    )
    what.add_argument(
        "--optimizer-steps",
        type=whole(1, _MOST_STEPS),
        default=1,
        metavar="N",
        help="a step ends with every N-th step() of the script's first optimizer (default 1)",
    )
    what.add_argument(
        "--patience",
        type=decimal,
        default=600.0,
        metavar="S",
        help="give up if the script takes no step for this many seconds (default 600)",
    )
    _add_surroundings(what)
    _add_machine(command.add_argument_group("the machine"))
    decision = command.add_argument_group("a plan")
    decision.add_argument(
        "--plan",
        "--budget",  # as `autosac plan` calls it
        metavar="BUDGET",
        help="also plan checkpointing within this memory of each GPU: 60GiB, 64GB or 85%%",
    )
    decision.add_argument("-o", "--output", type=filled_path, metavar="PLAN.json", help="file for the plan")
    add_breakdowns(command.add_argument_group("what to show"))
    add_output(command, debug="show tracebacks")
    command.set_defaults(run="script")


def _add_surroundings(what: argparse._ArgumentGroup) -> None:
    """What stands in the place of data, kernels and files that a script finds on a real machine."""
    what.add_argument(
        "--moe-load",
        default="balanced",
        metavar="LOAD",
        help="how tokens spread over experts: balanced (default), uniform, untrained, power-law[:ALPHA] or zipf[:S]",
    )
    what.add_argument(
        "--synthetic-data",
        nargs="?",
        const="text",
        metavar="COLUMNS",
        help="make up data sets and tokenizers that cannot be loaded; columns such as text,label:2 (default text)",
    )
    what.add_argument(
        "--stand-in",
        type=filled,
        action="append",
        default=[],
        metavar="NAME",
        help="stand-ins for kernels that cannot run here: flash_attn, apex, or a file of your own; repeat for several",
    )
    what.add_argument(
        "--checkpoints",
        action="store_true",
        help="let the script write its checkpoints, filled with zeros (default: no files)",
    )


def _add_machine(machine: argparse._ArgumentGroup) -> None:
    machine.add_argument(
        "--gpu", type=filled, required=True, help="GPU name (such as h100-sxm-80gb; see autosac gpus) or profile file"
    )
    machine.add_argument(
        "--nproc",
        type=whole(1, MOST_GPUS),
        metavar="N",
        help="GPUs of a node: gives the script torchrun's environment (default: one GPU, without it)",
    )
    machine.add_argument(
        "--nodes", type=whole(1, MOST_GPUS), default=1, metavar="N", help="number of nodes (default 1)"
    )
    machine.add_argument(
        "--rank",
        type=whole(0, MOST_GPUS - 1),
        action="append",
        metavar="R",
        help="run only this rank; repeat for several (default: rank 0 and the ranks that behave differently)",
    )
    machine.add_argument(
        "--cluster",
        type=filled,
        help="cluster name (such as hgx-h100; see autosac clusters) or file (default: the usual cluster of the GPU)",
    )
    machine.add_argument(
        "--alloc-conf",
        metavar="CONF",
        default=None,
        help="PYTORCH_CUDA_ALLOC_CONF (default: the environment's, as in a real run)",
    )
    machine.add_argument(
        "--unlimited", action="store_true", help="never run out of memory, to see how much the script needs"
    )


def add_breakdowns(group: argparse._ArgumentGroup) -> None:
    """What is shown of a simulated step, and written to files."""
    group.add_argument(
        "--time", action="store_true", help="break down the step time: cost models, modules, critical path"
    )
    group.add_argument(
        "--interference",
        choices=("on", "off"),
        default="on",
        help="model the slowdown of overlapping computation and communication (default on)",
    )
    group.add_argument(
        "--collectives",
        choices=("flows", "fitted", "alpha-beta", "chunks"),
        default="flows",
        help="cost model of collectives: flows that share links (default), fitted curves alone, latency and bandwidth, or "
        "chunks as in NCCL",
    )
    group.add_argument(
        "--memory", action="store_true", help="break down the memory peak: categories, modules, largest tensors"
    )
    group.add_argument("--memory-html", type=filled_path, metavar="FILE", help="draw memory over time as a web page")
    group.add_argument("--memory-png", type=filled_path, metavar="FILE", help="draw memory over time as a PNG image")
    group.add_argument(
        "--memory-snapshot",
        type=filled_path,
        metavar="FILE",
        help="write a snapshot for PyTorch's memory viewer (memory_viz)",
    )
    group.add_argument(
        "--trace", type=filled_path, metavar="FILE", help="write a timeline for Perfetto (Chrome trace format)"
    )
    group.add_argument(
        "--save-capture", type=filled_path, metavar="FILE", help="save the captured step as a trace file"
    )
