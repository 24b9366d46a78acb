"""Prices of generated kernels: by the bytes that Inductor counts, by kind, and by what loops read anew."""

from __future__ import annotations

import pytest

from autosac.estimator import load_hardware
from autosac.estimator.generated import ACROSS, SHARE, SPECIAL, TILED, GeneratedKernels
from autosac.estimator.work import generated_kind
from autosac.trace import Signature, TensorMeta

H100 = load_hardware("h100-sxm-80gb")
RATE = H100.mem_bandwidth_gbps * 1e6 * SHARE  # bytes in a millisecond


def ms(name: str, shape: tuple[int, int] = (1024, 4096), **work: int) -> float:
    metas = (TensorMeta(shape, (shape[1], 1), "bfloat16"),) * 2
    signature = Signature(f"triton.{name}", metas, (), arguments=tuple(work.items()), mutates=(1,))
    (answer,) = GeneratedKernels(H100).estimate([signature])
    assert answer is not None
    return answer.ms


def test_kinds_by_name() -> None:
    """Inductor names a kernel after what it is; hand-written kernels and templates are none of the three."""
    names = ("triton_poi_fused_add_0", "triton_per_fused_1", "triton_red_fused_2", "triton_tem_fused_mm_3", "my_kernel")
    assert [generated_kind(f"triton.{name}") for name in names] == ["pointwise", "persistent", "looped", "", ""]
    assert generated_kind("aten.mm.default") == ""


def test_bytes_are_what_inductor_counts() -> None:
    """A slice of a table costs its own bytes; without a count, all tensors are read or written once."""
    counted = ms("triton_poi_fused_0", nbytes=2**30) - ms("triton_poi_fused_0", nbytes=0)
    assert counted == pytest.approx(2**30 / RATE)
    assert ms("triton_poi_fused") == pytest.approx(ms("triton_poi_fused", nbytes=2 * 1024 * 4096 * 2))


def test_reductions_start_later() -> None:
    """The same bytes: a persistent reduction takes 0.7 us longer than a pointwise kernel, a looped one 1.8 us."""
    pointwise = ms("triton_poi_fused_0", nbytes=2**20)
    assert ms("triton_per_fused_0", nbytes=2**20) - pointwise == pytest.approx(0.7e-3)
    assert ms("triton_red_fused_0", nbytes=2**20) - pointwise == pytest.approx(1.8e-3)


def test_a_second_loop_reads_the_row_again() -> None:
    """528 rows of a vocabulary are more than the L2's 50 MB."""
    work = {"nbytes": 2 * 8192 * 128256, "rows": 8192, "reduced": 128256}
    once, twice = (ms("triton_red_fused_0", (8192, 128256), **work, loops=loops) for loops in (1, 2))
    assert twice - once == pytest.approx(2 * 8192 * 128256 / RATE)


def test_a_processor_takes_its_time_for_a_row_that_the_l2_holds() -> None:
    """16 rounds of 528 rows, 8 KiB each that are read twice, at 1,830 MHz; more bytes than that takes hide it."""
    work = {"rows": 16 * 528, "reduced": 4096, "loops": 2}
    start = ms("triton_red_fused_0", nbytes=0)
    walk = 16 * (0.69 + 16 * 0.057) * 1980 / 1830 * 1e-3
    shape = (16 * 528, 4096)
    assert ms("triton_red_fused_0", shape, nbytes=2 * 16 * 528 * 4096, **work) - start == pytest.approx(walk)
    assert ms("triton_red_fused_0", shape, nbytes=2**28, **work) - start == pytest.approx(2**28 / RATE)
    assert ms("triton_red_fused_0", (1, 4096), nbytes=2 * 4096, rows=1, reduced=4096, loops=2) - start == pytest.approx(
        walk / 16
    )


def test_tiles_reach_two_thirds_of_the_rate() -> None:
    """The same bytes of a kernel that changes the layout take 1 / 0.66 as long."""
    plain, tiled = (ms("triton_poi_fused_0", nbytes=2**30, **more) for more in ({}, {"tiles": True}))
    start = ms("triton_poi_fused_0", nbytes=0)
    assert (tiled - start) / (plain - start) == pytest.approx(1 / TILED)


@pytest.mark.parametrize(("across", "bound"), [(2**20, 2**30 / RATE), (2**28, 2**28 / (ACROSS * 132 * 1830e3))])
def test_a_reduction_touches_a_sector_for_each_element_across(across: int, bound: float) -> None:
    """Few such elements hide behind the bytes; many take half a cycle each on one of 132 processors."""
    start = ms("triton_red_fused_0", nbytes=0)
    assert ms("triton_red_fused_0", nbytes=2**30, across=across) - start == pytest.approx(bound)


@pytest.mark.parametrize(
    ("instructions", "bound"),
    [
        ({"single": 2**20, "double": 2**20}, 2**30 / RATE),
        ({"single": 2**38}, 2**38 / 33.5e9),
        ({"special": 2**36}, SPECIAL * 2**36 / 33.5e9),
        ({"single": 2**38, "double": 2**37}, 2**38 / 33.5e9 + 2**37 / 16.75e9),
    ],
)
def test_many_instructions_take_longer_than_the_bytes(instructions: dict[str, int], bound: float) -> None:
    """67 TFLOP/s are 33.5 thousand million instructions a millisecond, in double precision half of that."""
    start = ms("triton_poi_fused_0", nbytes=0)
    assert ms("triton_poi_fused_0", nbytes=2**30, **instructions) - start == pytest.approx(bound)


def test_additions_that_meet_take_as_long_as_in_eager_kernels() -> None:
    """2^28 additions at 1.05 a cycle and processor, behind which fewer bytes hide."""
    start = ms("triton_poi_fused_0", nbytes=0)
    took = ms("triton_poi_fused_0", nbytes=2**28, atomic=2**28) - start
    assert took == pytest.approx(2**28 / (1.05 * 132 * 1830e3))


def test_few_units_for_double_precision() -> None:
    """An L4 has 0.49 of 30.3 TFLOP/s in double precision."""
    l4 = load_hardware("l4")
    signature = Signature("triton.triton_poi_fused_0", (), (), arguments=(("nbytes", 0), ("double", 2**40)))
    (answer,) = GeneratedKernels(l4).estimate([signature])
    assert answer is not None
    assert answer.ms == pytest.approx(2**40 / 0.245e9, rel=1e-3)
