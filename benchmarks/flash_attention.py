"""Attention kernels as the authors of FlashAttention-3 and 4 measured them: ``python -m benchmarks.flash_attention``.

- H100 SXM5, 16,384 tokens, 2,048 columns in all heads, fp16, no mask: FlashAttention-3's paper (arXiv 2407.08608, figures),
  with FlashAttention-2 and cuDNN beside it.
- FlashAttention-2 in bf16, no mask: on a B200 (issue 1589 of Dao-AILab/flash-attention), on an H100 (pull request 2688, which
  does not name the GPU: its backwards are the paper's), on an H100 of 500 W (pull request 2443 of pytorch/benchmark, two with
  a causal mask) and on another B200 (pull request 171 of meta-pytorch/tritonbench, 8 sequences of any length).
- B200, 32,768 tokens, 2,048 columns, bf16: Dao-AILab/flash-attention, pull requests 2605 (forward, the faster machine) and
  2280 (8,192 positions, forward and backward).

Those marked with a star were used in a fit (`estimator/attention_times.py`): FlashAttention-2's on a B200 for one number. Its
prices are those of PyTorch's kernels in steps, about 11 % above bursts of its authors' own build.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from typing import NamedTuple

from autosac.estimator.hardware import load_hardware
from autosac.estimator.models import first_estimates
from autosac.estimator.pricing import default_models
from autosac.estimator.work import work_of
from autosac.trace import Scalar, Signature, TensorMeta

_COLUMNS = 2048
_LENGTHS = (512, 1024, 2048, 4096, 8192, 16384)


class Series(NamedTuple):
    """TFLOP/s by length; `tokens` in all sequences, or `batch` sequences of any length. `fitted`: by which the times were."""

    gpu: str
    kernel: str
    head_size: int
    causal: bool
    backward: bool
    measured: dict[int, float]
    tokens: int = 16384
    batch: int = 0
    fitted: bool = False


def _paper(kernel: str, head_size: int, backward: bool, *measured: float, fitted: bool = False) -> Series:
    by_length = dict(zip(_LENGTHS, measured, strict=True))
    return Series("h100-sxm-80gb", kernel, head_size, False, backward, by_length, fitted=fitted)


def _blackwell(kernel: str, head_size: int, causal: bool, backward: bool, measured: dict[int, float]) -> Series:
    return Series("b200-sxm-180gb", kernel, head_size, causal, backward, measured, tokens=32768, fitted=kernel == "FA4")


def _issue(backward: bool, *measured: float) -> Series:
    by_length = dict(zip(_LENGTHS, measured, strict=True))
    return Series("b200-sxm-180gb", "FA2", 64, False, backward, by_length, fitted=not backward)


def _page(backward: bool, *measured: float) -> Series:
    by_length = dict(zip(_LENGTHS, measured, strict=False))
    return Series("h100-sxm-80gb", "FA2", 64, False, backward, by_length)


def _benchmark(causal: bool, *ms: float) -> Series:
    """Given in milliseconds."""
    operations = {length: 4 * 16384 * _COLUMNS * length * (0.5 if causal else 1) for length in _LENGTHS}
    tera = {length: operations[length] / time / 1e9 for length, time in zip(_LENGTHS, ms, strict=False)}
    return Series("h100-sxm-96gb-meta", "FA2", 128, causal, False, tera)


SERIES = (
    _paper("FA2", 128, False, 309, 350, 362, 368, 370, 370),
    _paper("cuDNN", 128, False, 497, 574, 617, 609, 600, 595),
    _paper("FA3", 128, False, 467, 565, 625, 638, 646, 648),
    _paper("FA2", 256, False, 208, 251, 278, 293, 297, 298),
    _paper("cuDNN", 256, False, 308, 391, 450, 483, 497, 509),
    _paper("FA3", 256, False, 286, 427, 537, 612, 628, 642, fitted=True),
    _paper("FA2", 64, True, 198, 238, 264, 279, 287, 291),
    _paper("cuDNN", 64, True, 266, 348, 395, 417, 432, 433),
    _paper("FA3", 64, True, 272, 363, 422, 453, 472, 474, fitted=True),
    _paper("FA2", 128, True, 214, 260, 291, 310, 318, 322),
    _paper("cuDNN", 128, True, 305, 408, 465, 499, 518, 516),
    _paper("FA3", 128, True, 316, 424, 501, 542, 559, 561),
    _page(False, 252.5, 294.8, 308.1, 312.0, 310.2),
    _page(True, 189.9, 238.8, 263.7, 279.8, 299.2),
    _benchmark(False, 0.2368, 0.4197, 0.7987, 1.5588, 3.0867, 6.1425),
    _benchmark(True, 0.1874, 0.2780),
    _issue(False, 308.4, 359.3, 381.0, 306.9, 343.1, 379.4),
    _issue(True, 243.1, 280.6, 301.6, 314.7, 329.1, 334.0),
    Series(
        "b200-sxm-180gb",
        "FA2",
        128,
        False,
        False,
        {1024: 315.1, 2048: 352.1, 4096: 353.9, 8192: 361.6, 16384: 330.6},
        batch=8,
        fitted=True,
    ),
    _blackwell("cuDNN", 64, False, False, {1024: 980, 2048: 1072, 4096: 1118, 8192: 1147, 16384: 1157}),
    _blackwell("cuDNN", 64, True, False, {1024: 627, 2048: 826, 4096: 977, 8192: 1071, 16384: 1115}),
    _blackwell("FA4", 64, False, False, {1024: 775, 2048: 980, 4096: 1109, 8192: 1181, 16384: 1215}),
    _blackwell("FA4", 64, True, False, {1024: 457, 2048: 696, 4096: 902, 8192: 1063, 16384: 1164}),
    _blackwell("FA4", 128, False, False, {1024: 1145, 2048: 1385, 4096: 1553, 8192: 1665, 16384: 1749}),
    _blackwell("FA4", 128, True, False, {1024: 785, 2048: 1142, 4096: 1393, 8192: 1418}),
    _blackwell("FA4", 128, False, True, {8192: 1360}),
    _blackwell("FA4", 128, True, True, {8192: 1209}),
)


def signature_of(series: Series, length: int) -> Signature:
    """The call of PyTorch's that runs this kernel."""
    heads = _COLUMNS // series.head_size
    shape = (series.batch or series.tokens // length, heads, length, series.head_size)
    rows = length * _COLUMNS
    tensor = TensorMeta(shape, (rows, series.head_size, _COLUMNS, 1), "bfloat16")
    arguments: list[tuple[str, Scalar]] = [("dropout_p", 0.0), ("is_causal", series.causal)]
    if series.kernel in ("FA3", "FA4"):
        arguments.append(("implementation", series.kernel))
    backend = "cudnn" if series.kernel == "cuDNN" else "flash"
    name = f"aten._scaled_dot_product_{backend}_attention{'_backward' if series.backward else ''}.default"
    inputs = (tensor,) * (5 if series.backward else 3)
    return Signature(name, inputs, inputs[: 3 if series.backward else 1], tuple(arguments))


def main() -> None:
    """Print a line for each measurement, and the errors of each kernel."""
    errors: dict[tuple[str, str, str, int, str], list[float]] = defaultdict(list)
    for series in SERIES:
        direction = "backward" if series.backward else "forward"
        for length, tera in series.measured.items():
            signature = signature_of(series, length)
            measured_ms = work_of(signature).flops / tera / 1e9
            (found,) = first_estimates(default_models(load_hardware(series.gpu)).operators, [signature])
            error = found.ms / measured_ms - 1
            star = "*" if series.fitted else " "
            errors[star, series.gpu, series.kernel, series.head_size, direction].append(error)
            mask = "causal" if series.causal else ""
            print(
                f"{star} {series.gpu:<18} {series.kernel:<6} {series.head_size:>4} {mask:<6} {direction:<8} {length:>6,} "
                f"{found.ms:>8.3f} ms {measured_ms:>9.3f} {error:>+7.1%}"
            )
    print()
    for (star, gpu, kernel, head_size, direction), found_errors in errors.items():
        mean = f"mean {statistics.mean(found_errors):>+6.1%}, absolute {statistics.mean(map(abs, found_errors)):>5.1%}"
        print(f"{star} {gpu:<18} {kernel:<6} heads of {head_size:<4} {direction:<8} {mean} ({len(found_errors)} sizes)")


if __name__ == "__main__":
    main()
