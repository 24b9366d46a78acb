"""torchao's float8 linear layer as it was. Needs torchao.

Until 2025-01-13 (12396c648) input, weight and gradient were cast once each, until 2025-07-24 (c6de9b42a) the weight. Since
then both products of the backward cast their factors anew. torch.compile casts once, whatever the code asks for.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torchao.float8.config import ScalingGranularity
from torchao.float8.float8_linear import Float8Linear, matmul_with_hp_or_float8_args
from torchao.float8.float8_scaling_utils import NoopFwToFloat8BwDynamic, hp_tensor_to_float8_dynamic
from torchao.float8.float8_training_tensor import GemmInputRole


class WeightOnce(Float8Linear):
    """From 2025-01-13 to 2025-07-24, with one scale for a tensor."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """The weight is cast before the product, which keeps it for the backward."""
        return self.product(input)

    def product(self, input: torch.Tensor) -> torch.Tensor:
        """With what is cast already, or will be."""
        weight = self.cast(self.weight, GemmInputRole.WEIGHT, self.config.cast_config_weight.target_dtype).t()
        result: torch.Tensor = matmul_with_hp_or_float8_args.apply(input, weight, self.linear_mm_config, self.config)
        return result

    def cast(self, tensor: torch.Tensor, role: Any, dtype: torch.dtype) -> torch.Tensor:
        """To float8, by its largest element."""
        cast: torch.Tensor = hp_tensor_to_float8_dynamic(tensor, dtype, self.linear_mm_config, gemm_input_role=role)
        return cast


class Once(WeightOnce):
    """Until 2025-01-13, with one scale for a tensor."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Input and gradient are cast outside of the product."""
        output = self.product(self.cast(input, GemmInputRole.INPUT, self.config.cast_config_input.target_dtype))
        gradient = self.config.cast_config_grad_output.target_dtype
        result: torch.Tensor = NoopFwToFloat8BwDynamic.apply(output, self.linear_mm_config, gradient)
        return result


def put_back(model: nn.Module, kind: type[WeightOnce]) -> nn.Module:
    """Give the model's layers with one scale for a tensor the forward of `kind`."""
    for module in model.modules():
        layer: Any = module
        if type(layer) is not Float8Linear:
            continue
        if layer.config.cast_config_input.scaling_granularity is ScalingGranularity.TENSORWISE:
            layer.__class__ = kind
    return model
