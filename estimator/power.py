"""The clock that a step's mix of matrix products and memory traffic leaves under a GPU's power.

A controller holds the mean power over some tenths of a second, a step or more. Products draw power with a power of
the clock f (relative to the clock that the models know), memory traffic draws it whatever the clock of the processors is:

    P(f) = tdp * (IDLE + ((product_power - IDLE) * products * f^(EXPONENT - 1) + MEMORY * others) / (products / f + others))

with the milliseconds that the step's operators take at f = 1: `products` (matrix products, attention, convolutions) and
`others`. The clock is the largest f <= 1 with P(f) <= cap, which is the TDP or a lower one; products then take 1 / f of their
time. Operators that are not products keep theirs, and so do collectives, for which links decide.

`product_power` (of a profile) is what products alone would draw at full clock: 1 where the models know GPUs that hold their
clock. Those of Hopper and Blackwell were measured in short benchmarks. A B200's products that last reach 0.88 of these rates
(`benchmarks/fit_power.py`), which gives 1.17. An H100 of 700 W took 2.9 % longer for a compiled step of TorchTitan's 1B, of
whose time 73 % is products, than at full clock (`benchmarks/gpu/results`), which gives 1.22. Held out: published steps of
larger models on H100s and H200s, 80 to 89 % of whose time is products; they were 9 to 16 % too fast and are 3 to 5 %. A step
with much memory traffic does not reach the TDP, and keeps the full clock. H100s of 500 W are parts of their own: 1 fits them.

Products alone on an H100 of 500 W reach 0.75 of the rates of a 700-W part, in 16 bits as in 8 (FBGEMM, pull/2546: three sizes,
0.80, 0.74, 0.72 and 0.75, 0.73, 0.77); that gives EXPONENT. MEMORY is fitted to the published TorchTitan runs on such H100s
that are not compiled. Those that are compiled, half of whose time beside products is gone, were held out. IDLE is an estimate.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

import numpy as np
from numpy.typing import NDArray

from autosac.estimator.hardware import Hardware
from autosac.estimator.work import family
from autosac.trace import Op, Trace

_IDLE: Final = 0.25
_MEMORY: Final = 0.23
_EXPONENT: Final = 1.667  # ((500 / 700 - 0.25) / 0.75) ** (1 / 1.667) = 0.75
_LOWEST: Final = 0.25  # of the clock: no lower one is left
_STEPS: Final = 50
_PRODUCTS = (
    *("matmul", "batched_matmul", "attention_forward", "attention_backward"),
    *("convolution", "convolution_backward"),
)


def power_share(clock: float, products_ms: float, others_ms: float, product_power: float = 1.0) -> float:
    """Mean power relative to the TDP at this share of the clock; see the module's docstring."""
    total_ms = products_ms / clock + others_ms
    if total_ms <= 0:
        return _IDLE
    products: float = (product_power - _IDLE) * products_ms * clock ** (_EXPONENT - 1)
    return _IDLE + (products + _MEMORY * others_ms) / total_ms


def product_power(clock: float) -> float:
    """What products alone would draw at full clock, relative to the TDP, if the TDP lets them run at `clock`."""
    return _IDLE + (1 - _IDLE) * float(clock**-_EXPONENT)


def sustained_clock(hardware: Hardware, products_ms: float, others_ms: float) -> float:
    """The share of the clock that the power of `hardware` leaves for such a mix; never below a quarter.

    1 if neither a cap nor `product_power` says that products draw more than there is.
    """
    cap, power = (hardware.power_limit_w or hardware.tdp_w) / hardware.tdp_w, hardware.product_power
    if power_share(1.0, products_ms, others_ms, power) <= cap:
        return 1.0
    low, high = _LOWEST, 1.0
    for _ in range(_STEPS):
        middle = (low + high) / 2
        low, high = (middle, high) if power_share(middle, products_ms, others_ms, power) <= cap else (low, middle)
    return low


def uncapped(hardware: Hardware) -> Hardware:
    """The same GPU at the clock that the models know, whatever it draws there."""
    return replace(hardware, power_limit_w=0.0, product_power=min(hardware.product_power, 1.0))


def capped_ms(trace: Trace, event_ms: NDArray[np.float64], hardware: Hardware) -> NDArray[np.float64]:
    """The events' milliseconds at the clock that the power of `hardware` leaves; `event_ms` are those at full clock."""
    is_product = np.array([family(signature.name) in _PRODUCTS for signature in trace.signatures], dtype=bool)
    operators = np.array([type(event) is Op for event in trace.events], dtype=bool)
    signatures = [event.signature if type(event) is Op else 0 for event in trace.events]
    products = operators & is_product[signatures] if len(is_product) else np.zeros_like(operators)
    clock = sustained_clock(hardware, float(event_ms[products].sum()), float(event_ms[operators & ~products].sum()))
    return np.where(products, event_ms / clock, event_ms) if clock < 1 else event_ms
