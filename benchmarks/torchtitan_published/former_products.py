"""float8 products as they were before PyTorch's wheels came with CUDA 13 (PyTorch 2.11, March 2026).

Today cuBLAS 13 multiplies with one scale for a tensor and with one for each row, and adds partial sums up exactly at a cost of
7 % (`benchmarks/gpu/products.py`, `power.py`). Before, two things were slower on Hopper:

- exact sums (`use_fast_accum` is false, as in the gradients of layers with one scale): users of torchao found fast ones worth
  1.1 to 1.2 times the speed on an H100 (pytorch/ao, issue 2377);
- a scale for each row was CUTLASS's kernel up to CUDA 12.8 (pytorch/pytorch, pull request 157905): 1.2 times the time, from
  torchao's steps of Llama-3 8B on eight H100s, rowwise beside tensorwise, in March and in June of 2025 (pytorch/ao,
  docs/source, workflows and eager_tutorials).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from autosac.estimator.hardware import Hardware
from autosac.estimator.learned import LearnedMatmul, promotes_sums
from autosac.estimator.models import Estimate, Models
from autosac.estimator.pricing import models_for
from autosac.estimator.work import base_name
from autosac.trace import Signature, TraceInfo

CUDA_13: Final = "2026-03"
"""From this month on, runs are taken to use it."""
_PROMOTED, _PROMOTED_TODAY, _ROWWISE = 1.2, 1.07, 1.2


class FormerProducts:
    """The prices of scaled products on one GPU; other operators are left to the other models."""

    def __init__(self, hardware: Hardware) -> None:
        """On this GPU."""
        self._hardware, self._today = hardware, LearnedMatmul(hardware)

    def estimate(self, signatures: Sequence[Signature]) -> list[Estimate | None]:
        """Prices of the scaled products among them."""
        return [
            one and one._replace(ms=one.ms * self._slower(signature))
            if base_name(signature.name) == "_scaled_mm"
            else None
            for signature, one in zip(signatures, self._today.estimate(signatures), strict=True)
        ]

    def _slower(self, signature: Signature) -> float:
        factor = _PROMOTED / _PROMOTED_TODAY if promotes_sums(signature, self._hardware) else 1.0
        return factor * _ROWWISE if _scales_rows(signature) else factor


def _scales_rows(signature: Signature) -> bool:
    """Whether there is a float32 scale for each row of the left factor (not one for all, nor one for a block)."""
    if len(signature.inputs) < 3:
        return False
    rows, scale = signature.inputs[0].shape[0], signature.inputs[2]
    return rows > 1 and scale.dtype == "float32" and math.prod(scale.shape) == rows


def models_of(made: str, info: TraceInfo, hardware: Hardware) -> Models:
    """The models for a run that was made in that month."""
    models = models_for(hardware, info)
    if made >= CUDA_13 or hardware.compute_capability[0] != 9:
        return models
    return replace(models, operators=(FormerProducts(hardware), *models.operators))
