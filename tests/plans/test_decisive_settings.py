"""Which settings of a TorchTitan job a plan is made for."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from autosac.titan.settings import job_settings


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
