"""The forward of flash attention on AMD's GPUs (AOTriton, Composable Kernel): blocks of queries walk the keys.

    t = start + W (prologue + steps * step * sqrt(head size / 64)),    W = max(1, blocks / (2 P))

A block has 128 queries of one head, a step 64 keys; two blocks share one of the P compute units. A causal mask leaves out half
of the steps, but for the diagonal's. The backward is left to the roofline.
"""

from __future__ import annotations

import math

from autosac.estimator.hardware import Hardware
from autosac.estimator.work import attention_shape
from autosac.trace import Signature

_QUERIES, _KEYS, _HEAD = 128, 64, 64
_BLOCKS = 2
# Fitted to 6 kinds of 77 to 16,384 keys and heads of 64 and 512 (20 %); held out: three others (18 %).
_START_US, _PROLOGUE_US, _STEP_US = 2.3, 10.0, 3.9
_FITTED_MHZ = 2100.0


def attention_us(hardware: Hardware, signature: Signature) -> float | None:
    """Attention's forward in 16 bits; None for what is not computed by one such kernel."""
    shape = attention_shape(signature)
    if shape is None or shape.backward or shape.backend not in ("flash", "efficient", "cudnn"):
        return None
    if shape.dtype not in ("float16", "bfloat16"):
        return None
    blocks = shape.batch * shape.heads * math.ceil(shape.query_length / _QUERIES)
    steps = math.ceil(shape.key_length / _KEYS) * shape.share
    if shape.causal:
        steps = max(1.0, (steps + _QUERIES / _KEYS) / 2)
    waves = max(1.0, blocks / (_BLOCKS * hardware.sm_count))
    one = _PROLOGUE_US + steps * _STEP_US * math.sqrt(max(shape.head_size, shape.value_size) / _HEAD)
    return _START_US + waves * one * _FITTED_MHZ / hardware.boost_mhz
