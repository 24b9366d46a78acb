"""cuDNN's attention as NVIDIA measured it: ``python -m benchmarks.cudnn_attention --frontend DIR [--fit]``.

DIR is a checkout of NVIDIA/cudnn-frontend (3929da2, cuDNN 9.22); its ``benchmark/sdpa_benchmark_training/results`` hold
kernel times of a GB200 and a GB300 in bfloat16: Llama 3.1, DeepSeek-V3, Kimi K2.6, gpt-oss, Qwen3.5, LTX-2, Wan 2.2. Prints
the errors of each model's kernels. Those marked with a star were fitted (up to 16,384 positions); with ``--fit`` they are
fitted again.
"""

from __future__ import annotations

import argparse
import csv
import statistics
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from autosac.estimator.attention_times import BlockTimes
from autosac.estimator.hardware import load_hardware
from autosac.estimator.tiled_attention import TiledAttention
from autosac.trace import Scalar, Signature, TensorMeta
from benchmarks.attention_fit import fitted_times

_RESULTS = "benchmark/sdpa_benchmark_training/results"
_GPUS = {"NVIDIA GB200": "gb200-186gb", "NVIDIA GB300": "gb300-288gb"}
_FITTED = ("llama3.1", "kimiK26", "gpt_oss", "qwen35")
_LONGEST = 16384  # positions of what is fitted


class Row(NamedTuple):
    """One measured kernel."""

    model: str
    gpu: str
    backward: bool
    positions: int
    measured_us: float
    signature: Signature

    @property
    def fitted(self) -> bool:
        """Whether the model's parameters come from rows like this one."""
        return self.gpu == "gb200-186gb" and self.model in _FITTED and self.positions <= _LONGEST


def rows_of(folder: Path) -> Iterator[Row]:
    """The rows in bfloat16 of all tables with one time a row, the backwards as they are by default (not deterministic)."""
    for path in sorted((folder / _RESULTS).glob("*/gb?00/*.csv")):
        with path.open(encoding="utf-8", newline="") as file:
            for row in csv.DictReader(file):
                if row["data_type"] == "bfloat16" and row["success"] == "True" and row["deterministic_bwd"] == "False":
                    yield _row(row)


def _row(row: dict[str, str]) -> Row:
    backward = row["profile_pass"] == "bwd"
    batch, positions = int(row["batch_size"]), int(row["q_seqlen"])

    def tensor(heads: str, size: str) -> TensorMeta:
        h, d = int(row[heads]), int(row[size])
        return TensorMeta((batch, h, positions, d), (h * positions * d, d, h * d, 1), "bfloat16")

    query, key, value = (
        tensor("num_q_heads", "head_dim_qk"),
        tensor("num_kv_heads", "head_dim_qk"),
        tensor("num_kv_heads", "head_dim_vo"),
    )
    output = tensor("num_q_heads", "head_dim_vo")
    arguments: list[tuple[str, Scalar]] = [("is_causal", row["attn_mask"] == "top_left")]
    if row["sliding_window_size"]:
        arguments.append(("window_size_left", int(float(row["sliding_window_size"]))))
    name = f"aten._scaled_dot_product_cudnn_attention{'_backward' if backward else ''}.default"
    inputs = (output, query, key, value, output) if backward else (query, key, value)
    outputs = (query, key, value) if backward else (output,)
    signature = Signature(name, inputs, outputs, tuple(arguments))
    return Row(row["config_name"], _GPUS[row["gpu_name"]], backward, positions, float(row["time_ms"]) * 1e3, signature)


def errors_of(rows: Sequence[Row]) -> list[float]:
    """Of each row, the relative error of the price."""
    found = []
    models = {gpu: TiledAttention(load_hardware(gpu)) for gpu in {row.gpu for row in rows}}
    for row in rows:
        (estimate,) = models[row.gpu].estimate([row.signature])
        assert estimate is not None
        found.append(estimate.ms * 1e3 / row.measured_us - 1)
    return found


def print_errors(rows: Sequence[Row]) -> None:
    """A line for each model, direction and GPU."""
    groups: dict[tuple[str, str, str, str], list[float]] = defaultdict(list)
    for row, error in zip(rows, errors_of(rows), strict=True):
        direction = "backward" if row.backward else "forward"
        length = "longer" if row.positions > _LONGEST else ""
        groups["*" if row.fitted else " ", row.gpu, f"{row.model:<9}{direction:<9}", length].append(error)
    for (star, gpu, kernel, length), errors in groups.items():
        print(
            f"{star} {gpu:<12} {kernel} {length:<7} {len(errors)} sizes  mean {statistics.mean(errors):>+6.1%}  "
            f"absolute {statistics.mean(map(abs, errors)):>5.1%}"
        )
    for name, chosen in (("fitted", True), ("held out on the GB200", False)):
        mine = [row for row in rows if row.fitted == chosen and row.gpu == "gb200-186gb"]
        print(f"{name}: {statistics.mean(map(abs, errors_of(mine))):.1%} ({len(mine)} sizes)")


def fit(rows: Sequence[Row], backward: bool) -> BlockTimes:
    """Start, block, diagonal and tiles again; the rest is kept."""
    measured = [(row.signature, row.measured_us) for row in rows if row.fitted and row.backward == backward]
    count = 3 if backward else 4  # of head sizes

    def changed(known: BlockTimes, values: Sequence[float]) -> BlockTimes:
        start, block, diagonal, *tiles = values
        first, second, third, fourth = (*tiles, *known.tiles[count:])
        return known._replace(start=start, block=block, diagonal=diagonal, tiles=(first, second, third, fourth))

    first = [5.0, 2.0, 1.0, *(0.5 * (i + 1) for i in range(count))]
    return fitted_times("gb200-186gb", "cudnn", measured, backward, changed, first)


def main() -> None:
    """Print the errors, and the fit where it is asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--frontend", type=Path, required=True, metavar="DIR", help="a checkout of NVIDIA/cudnn-frontend"
    )
    parser.add_argument("--fit", action="store_true", help="fit the parameters again and print them")
    options = parser.parse_args()
    rows = list(rows_of(options.frontend))
    if not rows:
        parser.error(f"there are no tables below {options.frontend / _RESULTS}")
    if options.fit:
        print("forward ", fit(rows, backward=False))
        print("backward", fit(rows, backward=True))
    print_errors(rows)


if __name__ == "__main__":
    main()
