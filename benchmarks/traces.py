"""Every operator in profiler traces of real GPUs beside its price, before and after calibration with other traces, as
Markdown.

    python -m benchmarks.traces --truth DIR [--title TITLE] [--markdown FILE]

For users of `autosac calibrate --from-trace`, and for readers who want to know how accurate single prices are. Printed by
`python -m benchmarks.traces --truth DIR`. DIR holds traces of PyTorch's profiler, `<gpu>_<what>.json` or `.json.gz`. Traces
whose names begin with the same GPU are of that GPU. Each error is that of one kind of call (an operator with its shapes),
against the median of such calls in one trace.

- *as shipped*: the models without any correction.
- *after other traces*: corrected by the *other* traces of that GPU, with the operators that those measured. A GPU with one
  trace has no others: its cells are empty, and it does not count in this column of "all".
- *held out*: corrected by four fifths of the calls of all traces of the GPU, and judged on the remaining fifth.
- *fitted*: corrected by all calls.

A price is the time of an operator that runs alone. So operators that only ran beside collectives are used for corrections,
but not judged. Traces of GPUs without a profile are left out.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from autosac.errors import UsageError
from autosac.estimator import load_hardware
from autosac.estimator.calibration.traces.correction import Correction
from autosac.estimator.calibration.traces.evidence import TraceEvidence, gather, occupied
from autosac.estimator.calibration.traces.learn import (
    PricedRow,
    held_out_logs,
    measured_operators,
    price_rows,
    profile_gpu,
)
from autosac.files.writing import write_text_atomically
from autosac.kineto import read_profile
from autosac.trace import Signature
from benchmarks.truth import truth_folder

# Which of several profiles with the same figures it is: PG509 is NVIDIA's SXM4 board.
_GPUS = {"a100": "a100-sxm-40gb"}
_WORST = 25
_TITLE = "Operators of profiler traces"
_NAN = math.nan


class Judged(NamedTuple):
    """One operator with its errors (signed, relative): as shipped, after the other traces, held out, fitted."""

    priced: PricedRow
    shipped: float
    other: float
    held_out: float
    fitted: float

    @property
    def ms(self) -> float:
        """Device time of all its calls."""
        return self.priced.row.us * self.priced.row.calls / 1e3


def judge(gpu: str, traces: Sequence[TraceEvidence]) -> list[Judged]:
    """Every operator of the traces of one GPU."""
    priced = price_rows(load_hardware(gpu), occupied(traces))
    observed = [p.observed for p in priced]
    everything = Correction.fit(observed)
    held_out = held_out_logs(observed, everything).tolist()
    fitted = everything.predict([o.point for o in observed])[0].tolist()
    other = _by_other_traces(priced)
    return [
        Judged(p, *(_error(p, log) for log in (0.0, *logs)))
        for p, *logs in zip(priced, other, held_out, fitted, strict=True)
        if not p.row.beside
    ]


def _error(p: PricedRow, log: float) -> float:
    return math.exp(log) * p.shipped_us / p.row.us - 1


def _by_other_traces(priced: Sequence[PricedRow]) -> list[float]:
    """The correction of every row by the traces that it is not of; NaN where there are none."""
    logs = [_NAN] * len(priced)
    for name in {p.row.trace for p in priced}:
        others = [p for p in priced if p.row.trace != name]
        if not others:
            continue
        correction = Correction.fit([p.observed for p in others])
        measured = measured_operators(others)
        mine = [i for i, p in enumerate(priced) if p.row.trace == name]
        means = correction.predict([priced[i].observed.point for i in mine])[0].tolist()
        for i, mean in zip(mine, means, strict=True):
            logs[i] = _correction(priced[i], mean, correction, measured)
    return logs


def _correction(
    p: PricedRow, mean: float, correction: Correction, measured: Mapping[Signature, tuple[float, float]]
) -> float:
    """As the profile would have it: what was measured, else the correction of a family with evidence, else nothing."""
    if p.row.signature in measured:
        return math.log(measured[p.row.signature][0] * 1e3 / p.shipped_us)
    return mean if p.observed.point.family in correction.families else 0.0


# ---- tables ----------------------------------------------------------------------------------------------------


def _percent(values: Sequence[float]) -> str:
    known = [abs(v) for v in values if math.isfinite(v)]
    return f"{statistics.median(known):.1%}" if known else "–"


def _half_of_time(judged: Sequence[Judged], errors: Sequence[float]) -> str:
    """The error within which half of the device time is priced."""
    rows = sorted((abs(e), j.ms) for e, j in zip(errors, judged, strict=True) if math.isfinite(e))
    total, seen = sum(ms for _, ms in rows), 0.0
    for error, ms in rows:
        seen += ms
        if seen >= total / 2:
            return f"{error:.1%}"
    return "–"


def _line(name: str, judged: Sequence[Judged]) -> str:
    columns = [[getattr(j, field) for j in judged] for field in ("shipped", "other", "held_out", "fitted")]
    total = sum(j.ms * (1 + j.shipped) for j in judged) / sum(j.ms for j in judged)
    cells = [name, str(len(judged)), f"{sum(j.ms for j in judged):.2f}", *map(_percent, columns)]
    cells += [_half_of_time(judged, columns[0]), _half_of_time(judged, columns[1]), f"{total:.2f}"]
    return "| " + " | ".join(cells) + " |"


_HEAD = (
    "| {} | kinds of calls | device ms | as shipped | after other traces | held out | fitted "
    "| half the time: shipped | after other traces | shipped / measured, sum |"
)


def _table(what: str, groups: Mapping[str, Sequence[Judged]]) -> list[str]:
    return [_HEAD.format(what), "|---|" + "---:|" * 9, *(_line(name, rows) for name, rows in groups.items())]


def _grouped(judged: Sequence[Judged], key: str) -> dict[str, list[Judged]]:
    groups: dict[str, list[Judged]] = {}
    for j in judged:
        name = j.priced.observed.point.family if key == "family" else j.priced.row.trace
        groups.setdefault(name, []).append(j)
    return dict(sorted(groups.items(), key=lambda item: -sum(j.ms for j in item[1])))


def _worst(judged: Sequence[Judged]) -> list[str]:
    """The operators that the shipped models misprice by most milliseconds."""
    lines = ["| operator | first shapes | calls | measured us | shipped us | after other traces us |"]
    lines.append("|---|---|---:|---:|---:|---:|")
    for j in sorted(judged, key=lambda j: -abs(j.shipped) * j.ms)[:_WORST]:
        row = j.priced.row
        shapes = " ".join(f"{list(m.shape)}" for m in row.signature.inputs[:3]) or "-"
        dtype = row.signature.inputs[0].dtype if row.signature.inputs else ""
        after = f"{row.us * (1 + j.other):.1f}" if math.isfinite(j.other) else "–"
        cells = [f"`{row.signature.name}` {dtype}", shapes, row.calls, f"{row.us:.1f}", f"{j.priced.shipped_us:.1f}"]
        lines.append("| " + " | ".join(map(str, [*cells, after])) + " |")
    return lines


def _coverage(traces: Mapping[str, Sequence[TraceEvidence]]) -> list[str]:
    lines = [
        "| trace | device ms | priced operators | of them beside collectives only | collectives | unknown operators "
        "| not readable | no operator |"
    ]
    lines.append("|---|" + "---:|" * 7)
    for mine in traces.values():
        for t in mine:
            beside = sum(row.us * row.calls for row in t.rows if row.beside)
            parts = [t.covered_us, beside, t.collectives_us, sum(t.unknown.values()), sum(t.unreadable.values())]
            parts.append(sum(us for _, us in t.lost.values()))
            cells = [Path(t.path).name, f"{t.total_us / 1e3:.1f}", *(f"{us / t.total_us:.1%}" for us in parts)]
            lines.append("| " + " | ".join(cells) + " |")
    return lines


def report(found: Mapping[str, Sequence[TraceEvidence]], title: str = _TITLE) -> str:
    """The page, from the traces of each GPU."""
    judged = {gpu: judge(gpu, traces) for gpu, traces in found.items()}
    everything = [j for mine in judged.values() for j in mine]
    lines = [f"# {title}", "", *(__doc__ or "").split("\n\n", 2)[2].strip().splitlines(), ""]
    lines += ["## What the traces hold", "", *_coverage(found), ""]
    lines += ["## By GPU", "", *_table("GPU", judged | {"all": everything}), ""]
    for gpu, mine in judged.items():
        lines += [f"## {gpu}", "", *_table("trace", _grouped(mine, "trace")), ""]
        lines += [*_table("family", _grouped(mine, "family")), ""]
        lines += ["Mispriced by most milliseconds:", "", *_worst(mine), ""]
    return "\n".join(lines)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--truth", type=truth_folder("traces"), required=True, metavar="DIR", help="the folder of the traces"
    )
    parser.add_argument("--title", default=_TITLE, help="the page's first line")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="write the page here")
    arguments = parser.parse_args()
    files = sorted(path for path in arguments.truth.glob("*.json*") if path.name.endswith((".json", ".json.gz")))
    if not files:
        raise SystemExit(f"{arguments.truth} holds no traces")
    found: dict[str, list[TraceEvidence]] = {}
    for path in files:
        try:
            profile = read_profile(path)
            gpu = _GPUS.get(path.name.split("_")[0]) or profile_gpu(profile)
        except UsageError as e:
            print(f"left out: {e}", file=sys.stderr)
            continue
        found.setdefault(gpu, []).append(gather(profile))
    if not found:
        raise SystemExit(f"no trace in {arguments.truth} is of a known GPU")
    page = report(found, arguments.title)
    print(page)
    if arguments.markdown is not None:
        write_text_atomically(arguments.markdown, page + "\n")


if __name__ == "__main__":
    main()
