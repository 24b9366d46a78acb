"""The clock that a step's mix of matrix products and memory traffic leaves under a GPU's power.

A controller holds the mean power over some tenths of a second, a step or more. Products draw power with a power of
the clock f (relative to the clock that the models know), memory traffic draws it whatever the clock of the processors is:

    P(f) = tdp * (IDLE + (power * products * f^(EXPONENT - 1) + memory * others) / (products / f + others))

with the milliseconds that the step's operators take at f = 1: `products` (matrix products, attention, convolutions) and
`others`. `power` is `product_power` - IDLE for matrix products and attention in 8 and 16 bits, 1 - IDLE for other products.
The clock is the largest f <= 1 with P(f) <= cap, which is the TDP or a lower one; products then take 1 / f of their time.
Memory traffic counts for no more than the cap leaves: products never run slower for it than alone.
Operators that are not products keep theirs, and so do collectives, for which links decide. Copies between host and device
run on copy engines beside the operators and draw next to nothing: they are not among `others`.

`product_power` (of a profile) is what products alone would draw at full clock: 1 where the models know GPUs that hold their
clock. Those of Hopper and Blackwell were measured in short benchmarks. A B200's products that last reach 0.88 of these rates
(`benchmarks/fit_power.py`), which gives 1.17. An H100 of 700 W took 2.9 % longer for a compiled step of TorchTitan's 1B, of
whose time 73 % is products, than at full clock (`benchmarks/gpu/results`), which gives 1.22. Held out: published steps of
larger models on H100s and H200s, 80 to 89 % of whose time is products; they were 9 to 16 % too fast and are 3 to 5 %. A step
with much memory traffic does not reach the TDP, and keeps the full clock. H100s of 500 W are parts of their own: 1 fits them.

Products alone on an H100 of 500 W reach 0.75 of the rates of a 700-W part, in 16 bits as in 8 (FBGEMM, pull/2546: three sizes,
0.80, 0.74, 0.72 and 0.75, 0.73, 0.77); that gives EXPONENT. `memory_power` (of a profile) is what memory traffic draws. 0.23
is fitted to the published TorchTitan runs on such H100s that are not compiled. Those that are compiled, half of whose time
beside products is gone, were held out. IDLE is an estimate.

Checked on an H200 (docs/h200.md): four steps of Llama's layers, of 280 to 370 ms, are right with these numbers, products that
last as well. Copies alone draw more there (0.80 of the TDP, `memory_power` would be 0.55), and the clock follows the mix
within 50 ms, not over a step. That is 0.08 W for each GB/s; an A100's memory would draw 0.41 of its 400 W. With that, and
nothing that was fitted, ten published steps of TorchTitan on A100s of 330 W are -1.3 to +4.7 % off (with 0.23 +1.0 to +8.9 %).

No product runs above a locked clock (`locked_mhz` of a profile). The short benchmarks of an H200's products ran at about 1,700
MHz: their speed falls to 0.84 as the clock does to 1,425. Memory traffic and what is not known of other GPUs keep their time.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from autosac.estimator.hardware import MEMORY_POWER, Hardware
from autosac.estimator.stand_ins import is_computing
from autosac.estimator.work import crosses_to_host, family, item_bytes
from autosac.trace import Op, Signature, Trace

_IDLE: Final = 0.25
_EXPONENT: Final = 1.667  # ((500 / 700 - 0.25) / 0.75) ** (1 / 1.667) = 0.75
_LOWEST: Final = 0.25  # of the clock: no lower one is left
_STEPS: Final = 50
_MATRIX = ("matmul", "batched_matmul", "attention_forward", "attention_backward")
_PRODUCTS = (*_MATRIX, "convolution", "convolution_backward")


class Mix(NamedTuple):
    """Milliseconds of a step's operators at full clock: matrix products and attention in 8 and 16 bits whose prices come from
    short benchmarks, all other products, and what is no product.
    """

    matrix_ms: float
    other_products_ms: float
    rest_ms: float

    @property
    def products_ms(self) -> float:
        """All that takes longer at a lower clock."""
        return self.matrix_ms + self.other_products_ms


def power_share(clock: float, mix: Mix, product_power: float = 1.0, memory_power: float = MEMORY_POWER) -> float:
    """Mean power relative to the TDP at this share of the clock; see the module's docstring."""
    total_ms = mix.products_ms / clock + mix.rest_ms
    if total_ms <= 0:
        return _IDLE
    products = (product_power - _IDLE) * mix.matrix_ms + (1 - _IDLE) * mix.other_products_ms
    return _IDLE + float(products * clock ** (_EXPONENT - 1) + memory_power * mix.rest_ms) / total_ms


def product_power(clock: float) -> float:
    """What products alone would draw at full clock, relative to the TDP, if the TDP lets them run at `clock`."""
    return _IDLE + (1 - _IDLE) * float(clock**-_EXPONENT)


class PowerBudget(NamedTuple):
    """What a GPU may draw, relative to its TDP, what products alone would draw at full clock, and memory traffic at any."""

    cap: float = 1.0
    product_power: float = 1.0
    memory_power: float = MEMORY_POWER


FULL_CLOCK: Final = PowerBudget()  # at any mix


def budget_of(hardware: Hardware) -> PowerBudget:
    """Of a GPU."""
    cap = (hardware.power_limit_w or hardware.tdp_w) / hardware.tdp_w
    return PowerBudget(cap, hardware.product_power, hardware.memory_power)


def sustained_clock(hardware: Hardware, mix: Mix) -> float:
    """The share of the clock that the power of `hardware` leaves for such a mix; never below a quarter.

    1 if neither a cap nor `product_power` says that products draw more than there is.
    """
    return _clock_within(budget_of(hardware), mix)


def _clock_within(budget: PowerBudget, mix: Mix) -> float:
    cap, power = budget.cap, budget.product_power
    memory = min(budget.memory_power, max(0.0, cap - _IDLE))
    if power_share(1.0, mix, power, memory) <= cap:
        return 1.0
    low, high = _LOWEST, 1.0
    for _ in range(_STEPS):
        middle = (low + high) / 2
        low, high = (middle, high) if power_share(middle, mix, power, memory) <= cap else (low, middle)
    return low


def least_sustained_ms(budget: PowerBudget, matrix_ms: float, total_ms: float, beside_ms: float = 0.0) -> float:
    """What a stream's operators take at least, at the clock that is left to them, if they take `total_ms` at least at full
    clock, `matrix_ms` of it matrix products at least; `beside_ms` is the most that is no product on other streams.

    With M such products, R others, c = cap - IDLE, p = product_power - IDLE and q = memory_power, the clock f < 1 solves

        c (M / f + R) = p M f^(EXPONENT - 1) + q R,   so   M / f = (c - q) R / (p f^EXPONENT - c)

    with q no more than c. More R leaves a higher f (or the same), so both terms on the right of the first equation grow, and
    the time M / f + R with them. More M leaves a lower f: by the second one, M / f grows. So the time of what is known is no
    more than that of all. What is known of the total but not of its kind counts as R, which lengthens the time by least. Other
    products draw less than their share of the TDP as they slow down, and leave less room for the clock than R of the same
    length.
    """
    rest_ms = max(0.0, total_ms - matrix_ms)
    clock = _clock_within(budget, Mix(matrix_ms, 0.0, rest_ms + beside_ms))
    return max(total_ms, matrix_ms / clock + rest_ms)


def locked_clock(hardware: Hardware) -> float:
    """The share of their clock that a locked one leaves products; 1 if none is locked, or nobody has measured theirs."""
    if not hardware.locked_mhz or not hardware.product_mhz:
        return 1.0
    return min(1.0, hardware.locked_mhz / hardware.product_mhz)


def uncapped(hardware: Hardware) -> Hardware:
    """The same GPU at the clock that the models know, whatever it draws there."""
    return replace(hardware, power_limit_w=0.0, product_power=min(hardware.product_power, 1.0), locked_mhz=0.0)


def sustained_ms(
    trace: Trace, event_ms: NDArray[np.float64], hardware: Hardware, short: NDArray[np.bool_]
) -> NDArray[np.float64]:
    """The events' milliseconds at the clock that the power of `hardware` leaves; `event_ms` are those at full clock.

    `short`: whose prices come from short benchmarks. Without a cap only these take longer at a lower clock; prices that were
    measured on a GPU as it runs do not. Under a cap all products do.
    """
    most = locked_clock(hardware)
    if not hardware.power_limit_w and hardware.product_power <= 1 and most == 1:
        return event_ms  # no mix draws more than the TDP
    products, matrix, others = kinds(trace, short)
    sums = (float(event_ms[chosen].sum()) for chosen in (matrix, products & ~matrix, others))
    clock = min(most, sustained_clock(hardware, Mix(*sums)))
    return np.where(products if hardware.power_limit_w else matrix, event_ms / clock, event_ms)


class Kinds(NamedTuple):
    """Which events are products, which of them matrix products whose time the clock decides, and which are others."""

    products: NDArray[np.bool_]
    matrix: NDArray[np.bool_]
    others: NDArray[np.bool_]


def kinds(trace: Trace, short: NDArray[np.bool_]) -> Kinds:
    """Of a step's events. `short`: whose prices come from short benchmarks."""
    signatures = [
        event.signature if type(event) is Op else -1 for event in trace.events
    ]  # -1: what stands behind the last
    on_processors = np.array([not crosses_to_host(s) for s in trace.signatures] + [False])
    is_product = np.array([family(s.name) in _PRODUCTS or is_computing(s) for s in trace.signatures] + [False])
    is_matrix = np.array([_is_matrix(s) for s in trace.signatures] + [False])
    products, matrix = is_product[signatures], is_matrix[signatures] & short
    return Kinds(products, matrix, on_processors[signatures] & ~products)


def _is_matrix(signature: Signature) -> bool:
    """Whether it is a matrix product, or attention, in 8 or 16 bits."""
    narrow = any(item_bytes(meta.dtype) <= 2 for meta in signature.inputs[:1])
    return narrow and family(signature.name) in _MATRIX
