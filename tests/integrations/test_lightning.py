"""The callback for Lightning's Trainer, in real training on the CPU."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import nn

import autosac
from autosac.errors import UsageError
from tests.support.models import WIDTH, Block

lightning = pytest.importorskip("lightning")
BATCH = 16384


def fitted(callbacks: list[Any], fits: bool = True) -> tuple[Any, Any]:
    """A module, trained for two steps on fixed data if `fits`, and its Trainer."""
    torch.manual_seed(0)

    class Model(lightning.LightningModule):  # type: ignore[misc,name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Sequential(*(Block() for _ in range(4)))

        def training_step(self, batch: Any, _: int) -> torch.Tensor:
            loss: torch.Tensor = (self.layers(batch[0]) - batch[0]).pow(2).mean()
            self.log("loss", loss)
            return loss

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), lr=1e-3)

    module = Model()
    trainer = lightning.Trainer(
        accelerator="cpu",
        max_steps=2,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        gradient_clip_val=1.0,
        callbacks=callbacks,
    )
    data = torch.utils.data.TensorDataset(torch.randn(2 * BATCH, WIDTH, generator=torch.Generator().manual_seed(1)))
    if fits:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            trainer.fit(module, torch.utils.data.DataLoader(data, batch_size=BATCH))
    return module, trainer


def test_planned_training_is_the_same() -> None:
    """A plan for a budget below the step's peak: it checkpoints modules, and the parameters after training are the same."""
    from autosac.integrations.lightning import AutoSAC

    batch = (torch.randn(BATCH, WIDTH),)
    module, trainer = fitted([], fits=False)
    asking = AutoSAC(budget="1GiB", batch=batch)
    peak = autosac.simulate(asking.training(module, trainer)).peak_active_bytes
    callback = AutoSAC(budget=f"{0.9 * peak:.0f}B", batch=batch, budget_kind="active")
    plain, _ = fitted([])
    planned, _ = fitted([callback])
    assert callback.plan is not None and callback.plan.units
    assert callback.plan.predictions["autosac"].peak_active_bytes <= 0.9 * peak
    for expected, found in zip(plain.parameters(), planned.parameters(), strict=True):
        assert torch.equal(expected, found)


def test_wrong_arguments() -> None:
    """Neither a plan nor a budget, and a budget without a batch."""
    from autosac.integrations.lightning import AutoSAC

    with pytest.raises(UsageError, match="either a plan or a budget"):
        AutoSAC()
    with pytest.raises(UsageError, match="needs a batch"):
        AutoSAC(budget="1GiB")
