"""Operators on AMD's GPUs: products, attention and memory-bound kernels as ROCm's libraries and PyTorch's kernels run them.

Each module knows one kind of operator and answers with microseconds, or with None where nothing was measured; such operators
are left to the roofline. Numbers stand beside the constants. They were fitted to profiler traces of MI300Xs in TraceLens
(171dd747): OWLv2, Qwen1.5, sglang's Qwen3 8B, Stable Diffusion 3.5, a ResNet and norms. Traces of TimeSformer, a ViT, BERT and
Flux were held out. `docs/causes.md` has the errors. Another GPU of AMD scales them by its processors, clock and memory.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeAlias

from autosac.estimator.hardware import Hardware
from autosac.estimator.models import Estimate
from autosac.estimator.rocm.attention import attention_us
from autosac.estimator.rocm.memory import RocmMemory
from autosac.estimator.rocm.products import product_us
from autosac.estimator.work import crosses_to_host, family
from autosac.trace import Signature

__all__ = ["Rocm"]

Rule: TypeAlias = Callable[[Signature], float | None]

_FITTED_ON, _SCALED_STD = "mi300x", 0.15
# CDNA 3. NeuSight's tables of an MI210 and an MI250 (float32) agree with these softmaxes (31 -> 12 %), but not with the other
# memory-bound kernels: elementwise ones are 10 to 26 % too fast, gradients of norms three times.
_THIRD_GENERATION = (9, 4)


class Rocm:
    """The operators of one GPU of AMD; knows nothing of other vendors'."""

    def __init__(self, hardware: Hardware) -> None:
        """Model `hardware`."""
        self._known = hardware.vendor == "AMD"
        self._hardware = hardware
        memory = RocmMemory(hardware)
        # family -> the rule and the relative standard error of its prices on held-out traces
        self._rules: dict[str, tuple[Rule, float]] = {
            **dict.fromkeys(("matmul", "batched_matmul"), (partial(product_us, hardware), 0.15)),
            "attention_forward": (partial(attention_us, hardware), 0.3),
            "softmax": (memory.softmax_us, 0.2),
        }
        if hardware.compute_capability >= _THIRD_GENERATION:
            self._rules |= {
                **dict.fromkeys(("elementwise", "fill"), (memory.elementwise_us, 0.2)),
                **dict.fromkeys(("norm", "norm_backward"), (memory.norm_us, 0.2)),
                "reduction": (memory.sum_us, 0.2),
                "gather": (memory.lookup_us, 0.3),
            }
        self._suffix = hardware.fitted_elsewhere(_FITTED_ON)
        self._more_std = _SCALED_STD if self._suffix else 0.0

    def estimate(self, signatures: Sequence[Signature]) -> list[Estimate | None]:
        """Prices of the operators whose kind was measured."""
        return [self._estimate(signature) if self._known else None for signature in signatures]

    def _estimate(self, signature: Signature) -> Estimate | None:
        kind = family(signature.name)
        if kind not in self._rules or not signature.outputs or crosses_to_host(signature):
            return None
        if any(meta.place != "device" for meta in (*signature.inputs, *signature.outputs) if meta.shape):
            return None
        rule, rel_std = self._rules[kind]
        us = rule(signature)
        if us is None:
            return None
        us = max(us, self._hardware.kernel_us)
        return Estimate(us * 1e-3, f"rocm:{kind}{self._suffix}", math.hypot(rel_std, self._more_std))
