"""Clocks under a power cap, worked out by hand."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autosac.estimator import load_hardware, price
from autosac.estimator.power import (
    Mix,
    budget_of,
    least_sustained_ms,
    power_share,
    product_power,
    sustained_clock,
    uncapped,
)
from autosac.trace import Signature, TensorMeta, Trace

H100 = replace(load_hardware("h100-sxm-80gb"), product_power=1.0)


def _capped(watts: float) -> float:
    return sustained_clock(replace(H100, power_limit_w=watts), Mix(1.0, 0.0, 0.0))


def test_products_alone_draw_the_tdp_and_fall_with_a_root() -> None:
    """At 700 W an H100 keeps its clock; at 500 W products run at ((5/7 - 1/4) / (3/4))^(1/1.667) of it, 0.75."""
    assert _capped(700) == 1
    assert _capped(500) == pytest.approx(((5 / 7 - 0.25) / 0.75) ** (1 / 1.667))
    assert _capped(500) == pytest.approx(0.75, abs=1e-3)
    assert sustained_clock(H100, Mix(1.0, 0.0, 0.0)) == 1


def test_memory_traffic_leaves_room_for_the_clock() -> None:
    """A step that streams half of its time draws 0.74 of the TDP: a cap of 80 % does not touch it, one of 70 % does."""
    assert power_share(1.0, Mix(1.0, 0.0, 1.0)) == pytest.approx(0.25 + (0.75 + 0.23) / 2)
    assert sustained_clock(replace(H100, power_limit_w=560), Mix(1.0, 0.0, 1.0)) == 1
    clock = sustained_clock(replace(H100, power_limit_w=490), Mix(1.0, 0.0, 1.0))
    assert power_share(clock, Mix(1.0, 0.0, 1.0)) == pytest.approx(0.7)
    assert clock < 1


def test_no_cap_takes_the_last_quarter_of_the_clock() -> None:
    """At 200 W products would run at 0.16 of the clock; a step of nothing draws what an idle GPU draws."""
    assert sustained_clock(replace(H100, power_limit_w=200), Mix(1.0, 0.0, 0.0)) == pytest.approx(0.25)
    assert power_share(1.0, Mix(0.0, 0.0, 0.0)) == 0.25


def test_memory_traffic_never_slows_products_below_their_own_clock() -> None:
    """At 250 W an A100's memory traffic alone would draw 0.66 of 400 W: products keep the clock that they have alone."""
    a100 = replace(load_hardware("a100-sxm-80gb"), power_limit_w=250)
    assert a100.memory_power == 0.41
    alone = ((250 / 400 - 0.25) / 0.75) ** (1 / 1.667)
    assert sustained_clock(a100, Mix(1.0, 0.0, 1.0)) == pytest.approx(alone)
    assert sustained_clock(a100, Mix(0.0, 0.0, 1.0)) == 1


def test_an_a100_of_330_watts() -> None:
    """Products alone run at ((0.825 - 0.25) / 0.75)^(1/1.667) = 0.85 of the clock; memory traffic draws 0.66."""
    capped = load_hardware("a100-sxm-80gb-330w")
    assert sustained_clock(capped, Mix(1.0, 0.0, 0.0)) == pytest.approx((0.575 / 0.75) ** (1 / 1.667))
    clock = sustained_clock(capped, Mix(0.7, 0.0, 0.3))
    assert power_share(clock, Mix(0.7, 0.0, 0.3), 1.0, 0.41) == pytest.approx(0.825)
    assert 0.89 < clock < 0.92


def test_only_products_are_slower(
    mm: Callable[..., Signature], meta: Callable[..., TensorMeta], make_trace: Callable[..., Trace]
) -> None:
    """A product and an addition, and an all-reduce: of the three only the product takes 1 / clock as long."""
    x = meta((8192, 8192))
    trace = make_trace([mm(8192, 8192, 8192), Signature("aten.add.Tensor", (x, x), (x,))], [("all_reduce", 2**20)], 8)
    free, capped = (price(trace, hardware).event_ms for hardware in (H100, replace(H100, power_limit_w=400)))
    clock = sustained_clock(replace(H100, power_limit_w=400), Mix(free[0], 0.0, free[1]))
    assert capped.tolist() == pytest.approx([free[0] / clock, free[1], free[2]])
    assert clock < 0.9


def test_stand_ins_that_compute_draw_power_like_products(
    mm: Callable[..., Signature], meta: Callable[..., TensorMeta], make_trace: Callable[..., Trace]
) -> None:
    """Beside a stand-in of as many milliseconds a product of 1.4 TDP gets the clock that it has beside another product; beside
    one that states no FLOPs, that of memory traffic.
    """
    hungry, x = replace(H100, product_power=1.4), meta((8192, 8192))
    for flops, mix in ((1e12, (0.0, 1.0)), (0.0, (1.0, 0.0))):
        arguments = (("flops", flops), ("nbytes", 1e9), ("per_cycle", 0.0))
        kernel = Signature("stand_in.kernel.default", (x,), (x,), arguments)
        trace = make_trace([mm(8192, 8192, 8192), kernel], [], 1)
        full, found = (price(trace, hardware).event_ms for hardware in (H100, hungry))
        rest_ms, other_ms = (share * float(full[1]) for share in mix)
        clock = sustained_clock(hungry, Mix(float(full[0]), other_ms, rest_ms))
        assert found.tolist() == pytest.approx([full[0] / clock, full[1]])


def test_products_do_not_run_above_a_locked_clock(
    mm: Callable[..., Signature], meta: Callable[..., TensorMeta], make_trace: Callable[..., Trace]
) -> None:
    """Locked to 0.6 of their clock, products take 1 / 0.6 as long, under a cap that leaves 0.75, too; additions do not."""
    x = meta((8192, 8192))
    trace = make_trace([mm(8192, 8192, 8192), Signature("aten.add.Tensor", (x, x), (x,))], [], 1)
    full = price(trace, H100).event_ms
    known = replace(H100, product_mhz=1500)
    for hardware in (replace(known, locked_mhz=900), replace(known, locked_mhz=900, power_limit_w=500)):
        assert price(trace, hardware).event_ms.tolist() == pytest.approx([full[0] / 0.6, full[1]])
    for free in (
        replace(H100, locked_mhz=900),
        replace(known, locked_mhz=1800),
        uncapped(replace(known, locked_mhz=900)),
    ):
        assert price(trace, free).event_ms.tolist() == full.tolist()


def test_copies_to_the_host_leave_no_power_to_products(
    mm: Callable[..., Signature], meta: Callable[..., TensorMeta], make_trace: Callable[..., Trace]
) -> None:
    """Products that run at half of the clock do so beside copies between host and device, too, which take as long as ever."""
    hungry = replace(H100, product_power=product_power(0.5))
    x = meta((8192, 8192))
    there = x._replace(place="cpu")
    copies = [Signature("aten.copy_.default", pair, (pair[0],), mutates=(0,)) for pair in ((there, x), (x, there))]
    trace = make_trace([mm(8192, 8192, 8192), *copies], [], 1)
    full, found = (price(trace, hardware).event_ms for hardware in (H100, hungry))
    assert found.tolist() == pytest.approx([2 * full[0], full[1], full[2]])


def test_products_that_draw_more_than_the_tdp_lower_the_clock_themselves() -> None:
    """Power of 0.25 + 0.75 / 0.5^1.667 of the TDP leaves products half of the clock, and the full one if asked for without."""
    hungry = replace(H100, product_power=product_power(0.5))
    assert hungry.product_power == pytest.approx(0.25 + 0.75 * 2**1.667)
    assert sustained_clock(hungry, Mix(1.0, 0.0, 0.0)) == pytest.approx(0.5)
    assert sustained_clock(uncapped(replace(hungry, power_limit_w=300)), Mix(1.0, 0.0, 0.0)) == 1


def test_a_mix_below_the_tdp_keeps_the_clock() -> None:
    """Products of 1.2 TDP for half of the time, and memory traffic, draw 0.25 + (0.95 + 0.23) / 2 = 0.84 of the TDP."""
    hungry = replace(H100, product_power=1.2)
    assert power_share(1.0, Mix(1.0, 0.0, 1.0), 1.2) == pytest.approx(0.84)
    assert sustained_clock(hungry, Mix(1.0, 0.0, 1.0)) == 1
    assert sustained_clock(hungry, Mix(1.0, 0.0, 0.0)) < 1


def test_products_in_32_bits_draw_the_tdp() -> None:
    """Of products that draw 1.2 TDP in 16 bits, those in 32 bits draw 1.0: alone they keep the clock."""
    hungry = replace(H100, product_power=1.2)
    assert sustained_clock(hungry, Mix(0.0, 1.0, 0.0)) == 1
    assert power_share(1.0, Mix(1.0, 1.0, 0.0), 1.2) == pytest.approx(1.1)


def test_the_kind_of_a_product_is_read_from_its_operands(
    mm: Callable[..., Signature], make_trace: Callable[..., Trace]
) -> None:
    """A large product is slower on an H100 in bfloat16, at the clock that 1.22 of the TDP leaves it, and not in float32."""
    hardware = load_hardware("h100-sxm-80gb")
    for dtype, clock in (("bfloat16", (0.75 / (1.22 - 0.25)) ** (1 / 1.667)), ("float32", 1.0)):
        trace = make_trace([mm(8192, 8192, 8192, dtype)])
        full, sustained = (price(trace, gpu).event_ms[0] for gpu in (uncapped(hardware), hardware))
        assert sustained == pytest.approx(full / clock)


MS = st.floats(0, 100)
SHARE = st.floats(0.01, 1)


@given(
    power=st.sampled_from([1.0, 1.17, 1.22, 1.4]),
    memory=st.sampled_from([0.23, 0.55, 0.7]),
    watts=st.sampled_from([0.0, 400.0, 500.0, 630.0]),
    mix=st.tuples(MS, MS, MS),
    beside_ms=MS,
    known=st.tuples(SHARE, SHARE, SHARE),
)
def test_no_step_is_shorter_than_what_is_known_of_it(
    power: float,
    memory: float,
    watts: float,
    mix: tuple[float, float, float],
    beside_ms: float,
    known: tuple[float, float, float],
) -> None:
    """Of a stream's products, other products and others, and of others on another stream, shares are known."""
    gpu = replace(H100, product_power=power, memory_power=memory, power_limit_w=watts)
    matrix_ms, products_ms, rest_ms = mix
    clock = sustained_clock(gpu, Mix(matrix_ms, products_ms, rest_ms + beside_ms * known[2]))
    real_ms = matrix_ms / clock + (products_ms / clock if watts else products_ms) + rest_ms
    of_matrix, of_all, _ = known
    total_ms = matrix_ms * of_matrix + (sum(mix) - matrix_ms * of_matrix) * of_all
    least_ms = least_sustained_ms(budget_of(gpu), matrix_ms * of_matrix, total_ms, beside_ms)
    assert total_ms <= least_ms <= real_ms * (1 + 1e-9) + 1e-9


def test_the_least_time_solves_its_equation() -> None:
    """At 60 % of the TDP, 0.5 ms of products and 0.2 ms of others: at a clock f, c (M / f + R) = p M f^(2/3 ...) + q R."""
    budget = budget_of(replace(H100, power_limit_w=0.6 * 700))
    took_ms = least_sustained_ms(budget, 0.5, 0.7)
    clock = 0.5 / (took_ms - 0.2)
    assert 0.25 < clock < 1
    assert power_share(clock, Mix(0.5, 0.0, 0.2)) == pytest.approx(0.6, rel=1e-6)


def test_products_alone_take_as_long_as_their_clock_lets_them() -> None:
    """At 500 W they run at 0.75 of the clock; beside as much of others they are not slowed down at all at 560 W."""
    assert least_sustained_ms(budget_of(replace(H100, power_limit_w=500)), 3.0, 3.0) == pytest.approx(4.0, rel=1e-3)
    assert least_sustained_ms(budget_of(replace(H100, power_limit_w=560)), 3.0, 6.0) == 6.0
    assert least_sustained_ms(budget_of(H100), 3.0, 3.0) == 3.0
