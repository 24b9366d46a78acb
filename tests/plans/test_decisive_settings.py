"""Which settings of a TorchTitan job a plan is made for."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest

from autosac.errors import UsageError
from autosac.target import TargetGPU
from autosac.titan.settings import check_compiles, job_settings


@dataclass
class Model:
    name: str = "llama3"
    flavor: str = "8B"
    tokenizer: str = "path"


@dataclass
class Training:
    local_batch_size: int = 2
    steps: int = 100


@dataclass
class Parallelism:
    tensor_parallel_degree: int = 2
    any_other: str = "x"


@dataclass
class Optimizer:
    name: str = "AdamW"
    lr: float = 1e-3


@dataclass
class Compile:
    enable: bool = False


@dataclass
class Config:
    model: Model = field(default_factory=Model)
    training: Training = field(default_factory=Training)
    parallelism: Parallelism = field(default_factory=Parallelism)
    optimizer: Optimizer = field(default_factory=Optimizer)
    compile: Compile = field(default_factory=Compile)
    metrics: Any = None


def test_settings_that_decide_what_is_computed() -> None:
    """All of parallelism and compilation; of the others those that are listed and that this version of TorchTitan has."""
    assert job_settings(Config()) == {
        "model.name": "llama3",
        "model.flavor": "8B",
        "training.local_batch_size": "2",
        "parallelism.tensor_parallel_degree": "2",
        "parallelism.any_other": "x",
        "optimizer.name": "AdamW",
        "compile.enable": "False",
    }


def test_what_pytorch_does_not_compile_is_refused() -> None:
    """A job in bfloat16 on a GPU that has none of it, compiled; not if it is eager, in float32, or the GPU is an Ampere."""
    settings = {"compile.enable": "True", "training.mixed_precision_param": "bfloat16"}
    volta = TargetGPU(name="Tesla V100", compute_capability=(7, 0))
    with pytest.raises(
        UsageError, match=r"^Tesla V100 does not compute in bfloat16, and PyTorch compiles nothing in it"
    ):
        check_compiles(volta, settings)
    check_compiles(volta, settings | {"compile.enable": "False"})
    check_compiles(volta, settings | {"training.mixed_precision_param": "float32"})
    check_compiles(TargetGPU(compute_capability=(8, 0)), settings)
