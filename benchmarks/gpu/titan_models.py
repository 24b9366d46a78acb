"""What TorchTitan jobs of this benchmark import (``job.custom_config_module``): Llama sizes, synthetic data, a recorder.

Registers the flavors 1B, 3B (Llama-3.2's sizes, untied), 8B-cut and 8B-12 (eight and twelve layers of the 8B) of llama3, and
some layers of other models (`_CUT`: 14B-6 has six of them), with random tokens in place of a data set and its tokenizer.
Where the environment names a file (`RECORD`), every step's figures are appended to
it as JSON lines, as TorchTitan's own loggers get them.
"""

import dataclasses
import json
import os
from pathlib import Path
from typing import Any

import torchtitan.protocols.train_spec as registry
from torchtitan.components.metrics import BaseLogger, LoggerContainer, build_metrics_processor
from torchtitan.models.llama3.model.args import TransformerModelArgs
from torchtitan.protocols.train_spec import TrainSpec

from autosac.capture.jobs.synthetic_data import SyntheticLoader, SyntheticTokenizer
from autosac.integrations.torchtitan.job_config import AutoSAC as AutoSAC
from autosac.integrations.torchtitan.job_config import JobConfig as JobConfig

RECORD = "AUTOSAC_BENCHMARK_RECORD"
_COMMON: dict[str, Any] = {"n_kv_heads": 8, "multiple_of": 1024, "rope_theta": 500000, "vocab_size": 128256}
_LLAMAS = {
    "1B": TransformerModelArgs(dim=2048, n_layers=16, n_heads=32, ffn_dim_multiplier=1.5, **_COMMON),
    "3B": TransformerModelArgs(dim=3072, n_layers=28, n_heads=24, ffn_dim_multiplier=1.0, **_COMMON),
    "8B-cut": TransformerModelArgs(dim=4096, n_layers=8, n_heads=32, ffn_dim_multiplier=1.3, **_COMMON),
    "8B-12": TransformerModelArgs(dim=4096, n_layers=12, n_heads=32, ffn_dim_multiplier=1.3, **_COMMON),
}
_CUT = {
    "llama3": (("70B", 16),),
    "qwen3": (("14B", 6), ("32B", 16), ("30B-A3B", 12)),
    "deepseek_v3": (("16B", 4),),
    "gpt_oss": (("20b", 6),),
    "llama4": (("17bx16e_irope", 4),),
}


class _Recorder(BaseLogger):
    """Appends what TorchTitan logs to a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def log(self, metrics: dict[str, Any], step: int) -> None:
        """One line a step."""
        plain = {name: float(value) for name, value in metrics.items()}
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"step": step} | plain) + "\n")


def _metrics(*arguments: Any, **named: Any) -> Any:
    processor = build_metrics_processor(*arguments, **named)
    path = os.environ.get(RECORD)
    if path:
        container = LoggerContainer()
        container.add_logger(processor.logger)
        container.add_logger(_Recorder(Path(path)))
        processor.logger = container
    return processor


def _spec(name: str, flavors: dict[str, Any]) -> TrainSpec:
    spec = registry.get_train_spec(name)
    flavors = {**spec.model_args, **flavors}

    def loader(*, job_config: Any, **_: Any) -> SyntheticLoader:
        training = job_config.training
        vocabulary = getattr(flavors[job_config.model.flavor], "vocab_size", 2048)
        return SyntheticLoader(training.local_batch_size, training.seq_len, vocabulary)

    return dataclasses.replace(
        spec,
        model_args=flavors,
        build_tokenizer_fn=lambda *_, **__: SyntheticTokenizer(2048),
        build_dataloader_fn=loader,
        build_metrics_processor_fn=_metrics,
        build_validator_fn=None,
    )


def _cut(name: str, flavor: str, layers: int) -> dict[str, Any]:
    args = registry.get_train_spec(name).model_args[flavor]
    return {f"{flavor}-{layers}": dataclasses.replace(args, n_layers=layers)}


for _name, _flavors in _CUT.items():
    _found: dict[str, Any] = dict(_LLAMAS) if _name == "llama3" else {}
    for _flavor, _layers in _flavors:
        _found |= _cut(_name, _flavor, _layers)
    registry._extra_train_specs[_name] = _spec(_name, _found)
