"""The study's training step: model and optimizer built on a device, and one plain PyTorch step over a random batch.

Precision: FP runs in float32 (TF32 off), HP makes float16 the default dtype of everything, MP keeps float32 parameters
and runs the forward pass under float16 autocast. Attention may use the flash, cuDNN and memory-efficient kernels.
Activation checkpointing wraps every module of the family's classes. No gradient scaler is involved.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import torch
from torch import nn
from torch.distributed._composable.checkpoint_activation import checkpoint
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.h100_study.configs import StudyConfig
from benchmarks.h100_study.models import Family, family


@contextlib.contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def _attention_backends(device: torch.device) -> list[SDPBackend]:
    backends = [SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION, SDPBackend.EFFICIENT_ATTENTION]
    if device.type == "cpu":  # whose fused kernels know neither dropout nor every mask
        backends.append(SDPBackend.MATH)
    return backends


def _checkpoint_classes(model: nn.Module, names: frozenset[str]) -> None:
    for module in model.modules():
        if type(module).__name__ in names:
            checkpoint(module, preserve_rng_state=False)


def make_step(
    config: StudyConfig, device: torch.device, *, model_family: Family | None = None
) -> tuple[nn.Module, Callable[[], torch.Tensor]]:
    """Build model and optimizer on `device`; return the model and the function that trains a step and returns its loss.

    `model_family` replaces the family that the configuration names (smaller models of the same make, for tests).
    """
    chosen = model_family or family(config.model)
    dtype = torch.float16 if config.precision == "HP" else torch.float32
    with _default_dtype(dtype), torch.device(device):
        model = chosen.build()
    model.train()
    if config.activation_checkpointing:
        _checkpoint_classes(model, chosen.checkpointed)
    optimizer = chosen.optimizer(model)

    def step() -> torch.Tensor:
        autocast = torch.autocast(device.type, dtype=torch.float16, enabled=config.precision == "MP")
        with _default_dtype(dtype), sdpa_kernel(_attention_backends(device)):
            batch = chosen.batch(config, device)
            with autocast:
                loss = chosen.loss(model, batch)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        return loss.detach()

    return model, step
