"""Every kind of call in profiled training steps beside its price, when it was measured and now, as Markdown.

    python -m benchmarks.step_kinds [--on h100|h200] [--calibrated FILE] [--markdown FILE]

For readers who want to know how accurate prices of single operators are in real training steps.
Printed by `python -m benchmarks.step_kinds` from `benchmarks/step_kinds/h100_2026_11_23.json.gz`: measured by AutoSAC's own
`benchmarks/gpu` on 2026-11-23, H100 80GB HBM3, torch 2.11.0. *Before* is the price on that day, *after* the price now.

- *even*, *odd*: jobs with even and with odd numbers. Most rules were fitted to even jobs and to single operators that
  `autosac calibrate` measured on this GPU, and judged on odd jobs. Some kinds are in odd jobs only: batch norms and depthwise
  convolutions in bfloat16, TF32, `roll`. There the odd half was fitted to, too; see [causes](causes.md).
- *median*: of the absolute errors of all kinds of calls. *half of time*: the error within which half of the device time is
  priced. *ratio*: the sum of prices over the sum of times. *off*: the sum of absolute errors, in milliseconds.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from autosac.estimator import load_hardware
from autosac.estimator.models import first_estimates
from autosac.estimator.pricing import default_models
from autosac.estimator.work import base_name, family
from autosac.files.writing import write_text_atomically
from benchmarks.step_kinds.calibrated import fitted, prices_us
from benchmarks.step_kinds.evidence import Kind, load

_ON_H200 = """
For readers who want to know how accurate prices of single operators are on a GPU and in jobs that no rule had seen.
Printed by `python -m benchmarks.step_kinds --on h200` from `benchmarks/step_kinds/h200_2026_11_26.json.gz`: measured by
AutoSAC's own `benchmarks/gpu` (`unseen_later`, `layers`) on 2026-11-26, H200, torch 2.11.0. *Before* is the price on that day,
*after* the price now, both at full clock. In the two steps of Llama the GPU's power lowers the clock, so that products and
attention take longer than that.

Rules were changed with what these steps taught: batch norm with channels last (jobs 5 and 6, every second kind of call),
bilinear resampling and the softmax over planes (job 3), attention in windows (job 7, two of four shapes), the layouts of
products (job 9, checked on the H100's steps). All else is as it was, and unseen.

- *even*, *odd*: jobs with even and with odd numbers. The columns are those of [training steps on an H100](step-kinds.md).
"""


class On(NamedTuple):
    """Steps on one GPU: its profile, their file, what stands above the tables (empty: this module's docstring)."""

    gpu: str
    file: Path
    about: str = ""


_FOLDER = Path(__file__).parent
ON = {
    "h100": On("h100-sxm-80gb", _FOLDER / "h100_2026_11_23.json.gz"),
    "h200": On("h200-sxm-141gb", _FOLDER / "h200_2026_11_26.json.gz", _ON_H200),
}
_GROUPS = {
    "sums of rows and columns": ("sum", "mean", "amax", "linalg_vector_norm"),
    "layer norm": ("native_layer_norm",),
    "layer norm, backward": ("native_layer_norm_backward",),
    "batch norm": ("native_batch_norm", "native_batch_norm_backward"),
    "group norm": ("native_group_norm", "native_group_norm_backward"),
    "softmax of log": ("_log_softmax", "_log_softmax_backward_data"),
    "negative likelihood": ("nll_loss_forward", "nll_loss_backward"),
    "gradients of views": ("select_backward", "slice_backward"),
    "concatenations": ("cat",),
    "roll": ("roll",),
    "cuDNN's attention": ("_scaled_dot_product_cudnn_attention",),
    "cuDNN's attention, backward": ("_scaled_dot_product_cudnn_attention_backward",),
    "convolutions": ("convolution", "convolution_backward"),
}


class Judged(NamedTuple):
    """A kind of call with its price in microseconds: `before` these steps were known, and now."""

    kind: Kind
    before: float
    after: float


def judge(kinds: Sequence[Kind], gpu: str) -> list[Judged]:
    """All kinds with today's prices."""
    hardware = load_hardware(gpu)
    prices: dict[int, float] = {}
    for tf32 in (False, True):
        mine = [i for i, kind in enumerate(kinds) if kind.tf32 is tf32]
        models = default_models(hardware, tf32=tf32).operators
        answers = first_estimates(models, [kinds[i].signature for i in mine])
        prices |= {i: answer.ms * 1e3 for i, answer in zip(mine, answers, strict=True)}
    return [Judged(kind, kind.before_us, prices[i]) for i, kind in enumerate(kinds)]


def group(kind: Kind) -> str:
    """The group of the tables that a kind is of: one that a rule was made for, else its family."""
    base = base_name(kind.signature.name)
    named = next((name for name, bases in _GROUPS.items() if base in bases), "")
    return named or f"other: {family(kind.signature.name) or 'unknown'}"


def figures(judged: Sequence[Judged], price: Callable[[Judged], float]) -> list[str]:
    """Median error, error of half the time, ratio of the sums, milliseconds off."""
    if not judged:
        return ["–"] * 4
    errors = [abs(price(j) / j.kind.us - 1) for j in judged]
    total, seen, half = sum(j.kind.ms for j in judged), 0.0, 0.0
    for error, j in sorted(zip(errors, judged, strict=True), key=lambda pair: pair[0]):
        seen, half = seen + j.kind.ms, error
        if seen >= total / 2:
            break
    off = sum(error * j.kind.ms for error, j in zip(errors, judged, strict=True))
    ratio = sum(price(j) * j.kind.calls for j in judged) / 1e3 / total
    return [f"{statistics.median(errors):.1%}", f"{half:.1%}", f"{ratio:.2f}", f"{off:.1f}"]


_HEAD = (
    "| {} | kinds | device ms | median before | after | half of time before | after "
    "| ratio before | after | off ms before | after |"
)


def _line(name: str, judged: Sequence[Judged]) -> str:
    before, after = figures(judged, lambda j: j.before), figures(judged, lambda j: j.after)
    pairs = [cell for pair in zip(before, after, strict=True) for cell in pair]
    cells = [name, str(len(judged)), f"{sum(j.kind.ms for j in judged):.1f}", *pairs]
    return "| " + " | ".join(cells) + " |"


def report(judged: Sequence[Judged], about: str = "") -> str:
    """The page."""
    halves = {"even": [j for j in judged if j.kind.number % 2 == 0], "odd": [j for j in judged if j.kind.number % 2]}
    rule = "|---|" + "---:|" * 10
    title = "# Operators of training steps" + (" on an H200" if about else "")
    lines = [title, "", *(about or (__doc__ or "").split("\n\n", 2)[2]).strip().splitlines(), ""]
    lines += ["## All", "", _HEAD.format("jobs"), rule, *(_line(name, rows) for name, rows in halves.items())]
    lines += [_line("all", judged), "", "## By job", "", _HEAD.format("job"), rule]
    for number in sorted({j.kind.number for j in judged}):
        rows = [j for j in judged if j.kind.number == number]
        lines.append(_line(f"{number} {rows[0].kind.job}", rows))
    lines += ["", "## By kind of operator", "", _HEAD.format("operators, jobs"), rule]
    names = sorted({group(j.kind) for j in judged}, key=lambda name: (name not in _GROUPS, -_ms(judged, name)))
    for name in names:
        for half, rows in halves.items():
            mine = [j for j in rows if group(j.kind) == name]
            if mine:
                lines.append(_line(f"{name}, {half}", mine))
    return "\n".join(lines)


def compared(judged: Sequence[Judged], calibrated_us: Sequence[float]) -> str:
    """Shipped models beside models that are fitted to a sweep of the same GPU."""
    both = [j._replace(before=us) for j, us in zip(judged, calibrated_us, strict=True)]
    lines = ["## Calibrated", "", *_CALIBRATED.strip().splitlines(), ""]
    head = _HEAD.replace(" before", " calibrated").replace("| after", "| shipped")
    lines += [head.format("operators"), "|---|" + "---:|" * 10, _line("all", both)]
    for name in sorted({group(j.kind) for j in judged}, key=lambda name: -_ms(judged, name)):
        lines.append(_line(name, [j for j in both if group(j.kind) == name]))
    return "\n".join(lines)


_CALIBRATED = """
Models that are fitted to 2,312 single operators, which `autosac calibrate` measured on the same GPU, know the sizes of the
sweep but not the kernels. On a GPU with a shipped profile `autosac calibrate` therefore keeps the shipped models.
"""


def _ms(judged: Sequence[Judged], name: str) -> float:
    return sum(j.kind.ms for j in judged if group(j.kind) == name)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--calibrated", type=Path, metavar="FILE", help="compare with models of these measured operators"
    )
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="write the page here")
    parser.add_argument("--on", choices=ON, default="h100", help="the GPU (default: h100)")
    arguments = parser.parse_args()
    steps = ON[arguments.on]
    kinds = load(steps.file)
    judged = judge(kinds, steps.gpu)
    page = report(judged, steps.about)
    if arguments.calibrated is not None:
        page += "\n\n" + compared(judged, prices_us(kinds, fitted(arguments.calibrated), steps.gpu))
    print(page)
    if arguments.markdown is not None:
        write_text_atomically(arguments.markdown, page + "\n")


if __name__ == "__main__":
    main()
