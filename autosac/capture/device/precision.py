"""PyTorch's settings of this process that decide what an operator costs."""

from __future__ import annotations

from typing import Any

import torch


def matmul_allows_tf32() -> bool:
    """Whether float32 products may use TF32 (`torch.set_float32_matmul_precision`, ``allow_tf32`` or ``fp32_precision``)."""
    return bool(torch.backends.cuda.matmul.fp32_precision == "tf32")


def cudnn_allows_tf32() -> bool:
    """Whether float32 convolutions may use TF32."""
    cudnn: Any = torch.backends.cudnn
    return bool(cudnn.conv.fp32_precision == "tf32")
