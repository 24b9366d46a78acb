"""A power cap: the clock that a step's mix of products and memory traffic leaves under it.

A controller holds the mean power over some tenths of a second, a step or more. Products draw power with a power of
the clock f (relative to the clock that the models know), memory traffic draws it whatever the clock of the processors is:

    P(f) = tdp * (IDLE + (PRODUCT * products * f^(EXPONENT - 1) + MEMORY * others) / (products / f + others))

with the milliseconds that the step's operators take at f = 1: `products` (matrix products, attention, convolutions) and
`others`. The clock under a cap is the largest f <= 1 with P(f) <= cap; products then take 1 / f of their time. Operators
that are not products keep theirs, and so do collectives, for which links decide.

At full clock products alone draw the TDP: IDLE + PRODUCT = 1, since the models know GPUs that hold it. Products alone on an
H100 of 500 W reach 0.75 of the rates of a 700-W part, in 16 bits as in 8 (FBGEMM, pull/2546: three sizes, 0.80, 0.74, 0.72
and 0.75, 0.73, 0.77); that gives EXPONENT. MEMORY is fitted to the published TorchTitan runs on such H100s that are not
compiled. Those that are compiled, half of whose time beside products is gone, were held out. IDLE is an estimate.
"""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

from autosac.estimator.hardware import Hardware
from autosac.estimator.work import family
from autosac.trace import Op, Trace

_IDLE: Final = 0.25
_PRODUCT: Final = 0.75
_MEMORY: Final = 0.23
_EXPONENT: Final = 1.667  # ((500 / 700 - 0.25) / 0.75) ** (1 / 1.667) = 0.75
_LOWEST: Final = 0.25  # of the clock: no lower one is left
_STEPS: Final = 50
_PRODUCTS = (
    *("matmul", "batched_matmul", "attention_forward", "attention_backward"),
    *("convolution", "convolution_backward"),
)


def power_share(clock: float, products_ms: float, others_ms: float) -> float:
    """Mean power relative to the TDP at this share of the clock; see the module's docstring."""
    total_ms = products_ms / clock + others_ms
    if total_ms <= 0:
        return _IDLE
    return _IDLE + (_PRODUCT * products_ms * clock ** (_EXPONENT - 1) + _MEMORY * others_ms) / total_ms


def sustained_clock(hardware: Hardware, products_ms: float, others_ms: float) -> float:
    """The share of the clock that the cap of `hardware` leaves for such a mix; 1 without a cap, never below a quarter."""
    if not hardware.power_limit_w:
        return 1.0
    cap = hardware.power_limit_w / hardware.tdp_w
    if power_share(1.0, products_ms, others_ms) <= cap:
        return 1.0
    low, high = _LOWEST, 1.0
    for _ in range(_STEPS):
        middle = (low + high) / 2
        low, high = (middle, high) if power_share(middle, products_ms, others_ms) <= cap else (low, middle)
    return low


def capped_ms(trace: Trace, event_ms: NDArray[np.float64], hardware: Hardware) -> NDArray[np.float64]:
    """The events' milliseconds under the cap of `hardware`; `event_ms` are those without a cap."""
    if not hardware.power_limit_w:
        return event_ms
    is_product = np.array([family(signature.name) in _PRODUCTS for signature in trace.signatures], dtype=bool)
    operators = np.array([type(event) is Op for event in trace.events], dtype=bool)
    signatures = [event.signature if type(event) is Op else 0 for event in trace.events]
    products = operators & is_product[signatures] if len(is_product) else np.zeros_like(operators)
    clock = sustained_clock(hardware, float(event_ms[products].sum()), float(event_ms[operators & ~products].sum()))
    return np.where(products, event_ms / clock, event_ms)
