"""The callback for Hugging Face's Trainer, in real training on the CPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import autosac
from autosac.errors import UsageError

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")
LENGTH = 128


def trainer(folder: Path, callbacks: list[Any]) -> Any:
    """Of a small Llama on fixed data, on the CPU."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=256,
        hidden_size=128,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=LENGTH,
    )
    tokens = torch.randint(0, 256, (16, LENGTH), generator=torch.Generator().manual_seed(1))
    arguments = transformers.TrainingArguments(
        output_dir=str(folder),
        use_cpu=True,
        per_device_train_batch_size=4,
        max_steps=2,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
        max_grad_norm=1.0,
    )
    return transformers.Trainer(
        model=transformers.LlamaForCausalLM(config),
        args=arguments,
        train_dataset=[{"input_ids": row, "labels": row} for row in tokens],
        callbacks=callbacks,
    )


@pytest.mark.filterwarnings(
    "ignore::autosac.integrations.apply.PlanMismatchWarning"
)  # attention is another operator here
def test_planned_training_is_the_same(tmp_path: Path) -> None:
    """A plan for a budget below the step's peak: it checkpoints modules, and the parameters after training are the same."""
    from autosac.integrations.hf import AutoSAC

    plain = trainer(tmp_path, [])
    asking = AutoSAC(budget="1GiB", length=LENGTH, budget_kind="active")
    peak = autosac.simulate(asking.training(plain.model, plain.args)).peak_active_bytes
    callback = AutoSAC(budget=f"{0.9 * peak:.0f}B", length=LENGTH, budget_kind="active")
    planned = trainer(tmp_path, [callback])
    assert callback.plan is not None and callback.plan.units
    assert callback.plan.predictions["autosac"].peak_active_bytes <= 0.9 * peak
    plain.train()
    planned.train()
    for expected, found in zip(plain.model.parameters(), planned.model.parameters(), strict=True):
        assert torch.equal(expected, found)


def test_wrong_arguments() -> None:
    """Neither a plan nor a budget, and a budget without a length."""
    from autosac.integrations.hf import AutoSAC

    with pytest.raises(UsageError, match="either a plan or a budget"):
        AutoSAC()
    with pytest.raises(UsageError, match="needs the length"):
        AutoSAC(budget="1GiB")
