"""Prices of single operators, forward and backward, beside tables that somebody measured (NeuSight's format).

    python -m benchmarks.operator_tables --tables DIR [--gpu mi250=AMD_Instinct_MI250] [--worst 12] [--save FILE.md]

DIR is `scripts/asplos/label` of sitar-lab/NeuSight (MIT): a folder for each GPU, in it one CSV for each model, with the
milliseconds of each operator's forward and backward in float32. Every operator is captured on the simulated GPU with its own
shapes and priced. An error is that of one operator with one set of shapes, against the median of its rows. Measured by CUDA
events: what takes less than 30 us is mostly the events, and is left out. What host and events add to longer ones is the same
for every size: the last column compares from size to size only (Theil and Sen's line through a family's kinds). A backward
includes the gradients of the weights. The backward of dropout is left out, too: gradients of gradients were recorded there,
for which PyTorch runs other kernels.
"""

from __future__ import annotations

import argparse
import ast
import csv
import re
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

import torch
from scipy.stats import theilslopes
from torch import Tensor, nn
from torch.nn import functional as F

import autosac
from autosac.estimator import load_hardware, price
from autosac.files.writing import write_text_atomically
from autosac.trace import ModuleEnter, Op, Phase, Trace

FOLDERS = {
    "h100-sxm-80gb": "NVIDIA_H100_80GB_HBM3",
    "a100-pcie-80gb": "NVIDIA_A100_80GB_PCIe",
    "v100-pcie-32gb": "Tesla_V100-PCIE-32GB",
    "l4": "NVIDIA_L4",
    "mi210": "AMD_Instinct_MI210",
    "mi250": "AMD_Instinct_MI250",
}
_SHORTEST_MS = 0.03
_FLOAT = "torch.float32"
Shapes = tuple[tuple[int, ...], ...]


class Kind(NamedTuple):
    """One operator with its shapes."""

    name: str
    inputs: Shapes
    output: tuple[int, ...]


class Times(NamedTuple):
    """Milliseconds of a forward and of a backward."""

    forward: float
    backward: float


def _plain(function: Callable[..., Tensor]) -> Callable[[Kind], Callable[..., Tensor]]:
    return lambda kind: function


def _linear(kind: Kind) -> nn.Module:
    return nn.Linear(kind.inputs[0][-1], kind.output[-1])


OPERATORS: dict[str, Callable[[Kind], Callable[..., Tensor]]] = {
    "linear": _linear,
    "addmm": _plain(torch.addmm),
    "matmul": _plain(torch.matmul),
    "bmm": _plain(torch.bmm),
    "layer norm": lambda kind: nn.LayerNorm(kind.output[-1]),
    "softmax": _plain(lambda x: F.softmax(x, -1)),
    "dropout": _plain(lambda x: F.dropout(x, 0.1)),
    "gelu": _plain(F.gelu),
    "relu": _plain(F.relu),
    "tanh": _plain(torch.tanh),
    "pow": _plain(lambda x: torch.pow(x, 3.0)),
    "mul": _plain(lambda x, y=2.0: torch.mul(x, y)),
    "add": _plain(lambda x, y=2.0: torch.add(x, y)),
    "truediv": _plain(lambda x, y=2.0: torch.div(x, y)),
}
FAMILIES = {"linear": "products", "addmm": "products", "matmul": "products", "bmm": "products", "softmax": "softmax",
            "layer norm": "layer norm"}  # fmt: skip
_CLASSES = {
    "Linear": "linear",
    "LayerNorm": "layer norm",
    "Dropout": "dropout",
    "GELUActivation": "gelu",
    "ReLU": "relu",
}


class _Row(nn.Module):
    """An operator as a module: its calls are found by the module's name."""

    def __init__(self, kind: Kind) -> None:
        super().__init__()
        self.run = OPERATORS[kind.name](kind)

    def forward(self, *inputs: Tensor) -> Tensor:
        """Run it."""
        return self.run(*inputs)


def measured(folder: Path) -> dict[Kind, Times]:
    """What the training tables of a folder hold: the median of each kind."""
    found: dict[Kind, list[Times]] = defaultdict(list)
    for file in sorted(folder.glob("*-train-*.csv")):
        with file.open() as rows:
            for row in csv.DictReader(rows):
                kind = _kind(row)
                if kind is not None:
                    found[kind].append(Times(float(row["fw_latency"]), float(row["bw_latency"])))
    return {kind: Times(*map(statistics.median, zip(*times, strict=True))) for kind, times in found.items()}


def _kind(row: dict[str, str]) -> Kind | None:
    """The operator of a row; None if it is none that is judged."""
    if row["dtype"] != _FLOAT or not row["output_shape"].endswith(")"):
        return None
    if row["op"] == "call_module":
        name = _CLASSES.get(row["meta"].rpartition("<class '")[2].partition("'")[0].rpartition(".")[2])
    else:
        name = re.sub(r"^<(built-in )?(function|method) ", "", row["target"]).split(" ")[0].strip(">")
    inputs: Shapes = tuple(map(tuple, ast.literal_eval(row["input_shapes"])))
    if name not in OPERATORS or not inputs or any(0 in shape or not shape for shape in inputs):
        return None
    if name == "pow":
        inputs = inputs[:1]
    return Kind(name, inputs, tuple(ast.literal_eval(row["output_shape"])))


def predicted(kinds: Iterable[Kind], gpu: str) -> dict[Kind, Times]:
    """What a GPU's models say of forward and backward; all kinds are captured as one step."""
    order = list(kinds)

    def make_step(device: torch.device) -> tuple[nn.Module, Callable[[], None]]:
        rows = nn.ModuleList(map(_Row, order)).to(device)
        optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1, device=device))], lr=0.1)

        def step() -> None:
            for kind, row in zip(order, rows, strict=True):
                inputs = [torch.randn(shape, device=device, requires_grad=shape != (1,)) for shape in kind.inputs]
                output = row(*inputs)
                output.backward(torch.empty_like(output))
                row.zero_grad()
            optimizer.step()

        return rows, step

    simulation = autosac.simulate(make_step, gpu=gpu)
    sums = _times(simulation.trace, price(simulation.trace, load_hardware(gpu)).event_ms.tolist())
    return {kind: sums.get(i, Times(0.0, 0.0)) for i, kind in enumerate(order)}


def _times(trace: Trace, event_ms: list[float]) -> dict[int, Times]:
    """Milliseconds of each row, by its number, in its forward and in its backward."""
    number = {i: int(found[1]) for i, name in enumerate(trace.modules) if (found := re.match(r"(\d+)", name))}
    sums: dict[int, list[float]] = defaultdict(lambda: [0.0, 0.0])
    row = -1
    for event, ms in zip(trace.events, event_ms, strict=True):
        if type(event) is ModuleEnter and event.phase == Phase.FORWARD and event.module in number:
            row = number[event.module]
        if type(event) is Op and event.phase == Phase.FORWARD and event.module in number:
            sums[number[event.module]][0] += ms
        if type(event) is Op and event.phase == Phase.BACKWARD:
            sums[row][1] += ms
    return {row: Times(*values) for row, values in sums.items()}


class _Judged(NamedTuple):
    """One direction of one kind: what it was, measured and predicted ms."""

    kind: Kind
    direction: str
    measured: float
    predicted: float

    @property
    def error(self) -> float:
        """Predicted over measured, less 1."""
        return self.predicted / self.measured - 1


def judged(gpu: str, folder: Path) -> list[_Judged]:
    """Every kind and direction of a GPU that takes longer than the measurement itself."""
    truth = measured(folder)
    answers = predicted(truth, gpu)
    rows = []
    for kind, times in truth.items():
        for direction in ("forward", "backward"):
            if direction == "backward" and kind.name == "dropout":
                continue
            real, said = getattr(times, direction), getattr(answers[kind], direction)
            if real >= _SHORTEST_MS:
                rows.append(_Judged(kind, direction, real, said))
    return rows


def table(gpu: str, rows: list[_Judged], worst: int) -> str:
    """A GPU's errors by family and direction, and the kinds that are worst in milliseconds; Markdown."""
    groups: dict[tuple[str, str], list[_Judged]] = defaultdict(list)
    for row in rows:
        groups[FAMILIES.get(row.kind.name, "elementwise"), row.direction].append(row)
        groups["all", row.direction].append(row)
    lines = [
        "| family | direction | kinds | median error | mean error | sum predicted / measured | from size to size |",
        "|---|---|--:|--:|--:|--:|--:|",
    ]
    for (family, direction), members in sorted(groups.items()):
        errors = [abs(member.error) for member in members]
        ratio = sum(m.predicted for m in members) / sum(m.measured for m in members)
        lines.append(
            f"| {family} | {direction} | {len(members)} | {statistics.median(errors):.1%} | {statistics.mean(errors):.1%} "
            f"| {ratio:.2f} | {_slope(members)} |"
        )
    lines += ["", "| operator | direction | shapes | measured us | predicted us |", "|---|---|---|--:|--:|"]
    for row in sorted(rows, key=lambda row: -abs(row.predicted - row.measured))[:worst]:
        shapes = " ".join(map(str, map(list, row.kind.inputs)))
        lines.append(
            f"| {row.kind.name} | {row.direction} | {shapes} -> {list(row.kind.output)} | {1e3 * row.measured:.1f} "
            f"| {1e3 * row.predicted:.1f} |"
        )
    return f"## {gpu}\n\n" + "\n".join(lines) + "\n"


def _slope(members: list[_Judged]) -> str:
    """How much predictions grow for what measurements grow; "" for kinds that hardly differ."""
    measured_ms = [member.measured for member in members]
    if len(members) < 4 or max(measured_ms) < 1.5 * min(measured_ms):
        return ""
    return f"{1 / theilslopes(measured_ms, [member.predicted for member in members]).slope:.2f}"


def main() -> None:
    """See the module's docstring."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.operator_tables", description=__doc__.splitlines()[0])
    parser.add_argument("--tables", type=Path, required=True, metavar="DIR", help="folder with a folder for each GPU")
    parser.add_argument("--gpu", action="append", metavar="GPU=FOLDER", help="a GPU or profile and its folder")
    parser.add_argument("--worst", type=int, default=6, metavar="N", help="how many kinds are listed (default 6)")
    parser.add_argument("--save", type=Path, metavar="FILE.md", help="write the tables to this file, too")
    arguments = parser.parse_args()
    folders = dict(pair.split("=", 1) for pair in arguments.gpu) if arguments.gpu else FOLDERS
    text = "\n".join(table(g, judged(g, arguments.tables / name), arguments.worst) for g, name in folders.items())
    print(text)
    if arguments.save:
        write_text_atomically(arguments.save, text)


if __name__ == "__main__":
    main()
