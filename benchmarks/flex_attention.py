"""Flexible attention's Triton kernels as others measured them: ``python -m benchmarks.flex_attention [--fit]``.

- H100, bf16: pytorch/pytorch, pull request 135505 (September 2024), as far as its text can be read. Fitted, but for the
  backwards of 512 positions, which waited for the host.
- H100 of 500 W, bf16: pytorch/benchmark, pull request 2443 (August 2024). Held out.
- B200, bf16: pytorch/pytorch, pull request 188644. Two forwards, both fitted by one number.
"""

from __future__ import annotations

import argparse
import math
import statistics
from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

from autosac.estimator.attention_times import BlockTimes
from autosac.estimator.hardware import load_hardware
from autosac.estimator.models import first_estimates
from autosac.estimator.pricing import default_models
from autosac.trace import Scalar, Signature, TensorMeta
from benchmarks.attention_fit import fitted_times

_TILE = 128
_FITTED = "pytorch 135505"


class Row(NamedTuple):
    """One measured kernel."""

    source: str
    gpu: str
    batch: int
    heads: int
    kv_heads: int
    length: int
    head_size: int
    causal: bool
    backward: bool
    measured_us: float

    @property
    def fitted(self) -> bool:
        """Whether the times come from rows like this one."""
        return self.source == _FITTED and not (self.backward and self.length < 1024)

    @property
    def signature(self) -> Signature:
        """The call as traces have it."""

        def tensor(heads: int) -> TensorMeta:
            row = heads * self.head_size
            shape = (self.batch, heads, self.length, self.head_size)
            return TensorMeta(shape, (self.length * row, self.head_size, row, 1), "bfloat16")

        query, key = tensor(self.heads), tensor(self.kv_heads)
        tiles = math.ceil(self.length / _TILE)
        arguments: tuple[tuple[str, Scalar], ...] = () if self.causal else (("computed", tiles / (tiles + 1)),)
        name = f"flex_attention{'_backward' if self.backward else ''}"
        return Signature(name, (query, key, key), (query,), arguments)


def _pair(
    heads: tuple[int, int, int], length: int, head_size: int, causal: bool, forward: float, backward: float
) -> tuple[Row, Row]:
    first, second = (
        Row(_FITTED, "h100-sxm-80gb", *heads, length, head_size, causal, is_backward, us)
        for is_backward, us in ((False, forward), (True, backward))
    )
    return first, second


def _benchmark(length: int, causal: bool, ms: float) -> Row:
    return Row("benchmark 2443", "h100-sxm-96gb-meta", 16384 // length, 16, 16, length, 128, causal, False, ms * 1e3)


def _blackwell(causal: bool, tera: float) -> Row:
    operations = 4 * 8 * 16 * 1024**2 * 128 * (36 / 64 if causal else 1)  # tiles that are left out do not count
    return Row("pytorch 188644", "b200-sxm-180gb", 8, 16, 16, 1024, 128, causal, False, operations / tera / 1e6)


ROWS: tuple[Row, ...] = (
    *_pair((2, 16, 16), 512, 64, False, 17.2, 140.8),
    *_pair((2, 16, 16), 512, 64, True, 19.7, 140.1),
    *_pair((2, 16, 16), 512, 128, False, 22.4, 136.5),
    *_pair((8, 16, 16), 1024, 64, False, 111.0, 413.0),
    *_pair((8, 16, 16), 1024, 128, False, 227.0, 739.7),
    *_pair((8, 16, 16), 1024, 128, True, 169.8, 574.1),
    *_pair((8, 16, 16), 4096, 64, False, 1386.7, 4539.9),
    *_pair((8, 16, 2), 4096, 64, False, 1377.4, 5324.4),
    *_pair((8, 16, 2), 4096, 64, True, 824.5, 3210.2),
    *_pair((8, 16, 2), 4096, 128, False, 2867.7, 8616.3),
    *_pair((8, 16, 2), 4096, 128, True, 1653.8, 5306.8),
    _benchmark(512, False, 0.258),
    _benchmark(1024, False, 0.419),
    _benchmark(2048, False, 0.744),
    _benchmark(4096, False, 1.404),
    _benchmark(8192, False, 2.738),
    _benchmark(16384, False, 5.389),
    _benchmark(512, True, 0.202),
    _benchmark(1024, True, 0.289),
    _blackwell(False, 380.6),
    _blackwell(True, 276.6),
)


def fit(backward: bool) -> BlockTimes:
    """Start (of the forward only: backwards were not measured alone), block, diagonal and two tiles."""
    measured = [(row.signature, row.measured_us) for row in ROWS if row.fitted and row.backward == backward]

    def changed(known: BlockTimes, values: Sequence[float]) -> BlockTimes:
        block, diagonal, narrow, wide, *start = values
        tiles = (narrow, wide, 2 * wide - narrow, 3 * wide - 2 * narrow)
        return known._replace(start=start[0] if start else known.start, block=block, diagonal=diagonal, tiles=tiles)

    first = [4.0, 1.5, 2.0, 4.0, *([] if backward else [8.0])]
    return fitted_times("h100-sxm-80gb", "flex", measured, backward, changed, first)


def main() -> None:
    """Print a line for each measurement, and the errors of each source."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fit", action="store_true", help="fit the times again and print them")
    if parser.parse_args().fit:
        print("forward ", fit(backward=False))
        print("backward", fit(backward=True))
    errors: dict[tuple[str, str, str], list[float]] = defaultdict(list)
    for row in ROWS:
        (estimate,) = first_estimates(default_models(load_hardware(row.gpu)).operators, [row.signature])
        us = estimate.ms * 1e3
        star, direction = "*" if row.fitted else " ", "backward" if row.backward else "forward"
        error = us / row.measured_us - 1
        errors[star, row.source, direction].append(error)
        mask = "causal" if row.causal else ""
        size = f"{row.batch:>2} x {row.heads}/{row.kv_heads} x {row.length:,} x {row.head_size}"
        print(
            f"{star} {row.source:<15} {direction:<8} {mask:<6} {size:<24} {us:>8.1f} us {row.measured_us:>8.1f} {error:>+7.1%}"
        )
    for (star, source, direction), found in errors.items():
        absolute = statistics.mean(map(abs, found))
        print(
            f"{star} {source:<15} {direction:<8} mean {statistics.mean(found):>+6.1%}, absolute {absolute:.1%} ({len(found)})"
        )


if __name__ == "__main__":
    main()
