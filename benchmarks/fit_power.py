"""What matrix products of a B200 keep up when they last: ``python -m benchmarks.fit_power FILE``.

FILE is `configs/system/b200_bf16_ceperm.json` of SimuMax (MooreThreads/SimuMax 4dcaae5, Apache-2.0): the share of the peak
that each of 514 products reached on a B200. From them SimuMax predicts 43 steps of Megatron on such GPUs, which really take up
to 14 % longer. The shipped models know shorter measurements. The clock of a product is the ratio of both times; half of the
products (every second one) give it and `product_power` (`estimator/power.py`), the other half checks it.
"""

from __future__ import annotations

import json
import math
import statistics
import sys
from pathlib import Path

from autosac.estimator import load_hardware
from autosac.estimator.models import first_estimates
from autosac.estimator.power import product_power, uncapped
from autosac.estimator.pricing import default_models
from autosac.trace import Signature, TensorMeta

_GPU, _PEAK = "b200-sxm-180gb", 2250e12
_LEAST_MS = 0.2  # shorter products end before they fill the GPU


def _matrix(rows: int, columns: int, *, transposed: bool) -> TensorMeta:
    stride = (1, rows) if transposed else (columns, 1)
    return TensorMeta((rows, columns), stride, "bfloat16")


def read_products(file: Path) -> list[tuple[Signature, float]]:
    """The products of one batch with results in bf16, and their milliseconds.

    Layouts as SimuMax writes them: T is the side that a linear layer's forward transposes.
    """
    shares = json.loads(file.read_text())["accelerator"]["op"]["matmul"]["accurate_efficient_factor"]
    products = []
    for key, share in shares.items():
        fields = dict(part.strip().split("=") for part in key.split(","))
        if fields["b"] != "1" or fields["out_dtype"] != "bf16":
            continue
        m, k, n = (int(fields[name]) for name in "mkn")
        left = _matrix(m, k, transposed=fields["layout"][0] == "N" and fields["layout"][1] == "T")
        right = _matrix(k, n, transposed=fields["layout"] == "TN")
        result = _matrix(m, n, transposed=False)
        products.append((Signature("aten.mm.default", (left, right), (result,)), 2e3 * m * n * k / (_PEAK * share)))
    return products


def main() -> None:
    """Print the clock of both halves, and what it says of the power."""
    products = read_products(Path(sys.argv[1]))
    models = default_models(uncapped(load_hardware(_GPU)))
    prices = first_estimates(models.operators, [signature for signature, _ in products])
    ratios = [price.ms / ms for price, (_, ms) in zip(prices, products, strict=True) if ms >= _LEAST_MS]
    clocks = [statistics.median(ratios[half::2]) for half in (0, 1)]
    for name, half, clock in (("fitted", ratios[::2], clocks[0]), ("held out", ratios[1::2], clocks[1])):
        with_rule = statistics.median(abs(math.log(ratio / clocks[0])) for ratio in half)
        without = statistics.median(abs(math.log(ratio)) for ratio in half)
        print(f"{name}: {len(half)} products, clock {clock:.3f}, median error {with_rule:.1%} ({without:.1%})")
    print(f"product_power {product_power(clocks[0]):.2f}")


if __name__ == "__main__":
    main()
