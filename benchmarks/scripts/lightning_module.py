"""A LightningModule under Lightning's Trainer, in mixed precision.

python benchmarks/scripts/lightning_module.py [--width N] [--batch N]
"""

import argparse

import lightning
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--width", type=int, default=4096)
parser.add_argument("--batch", type=int, default=1024)
options = parser.parse_args()


class Autoencoder(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        width = options.width
        self.net = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def training_step(self, batch, _):
        loss = (self.net(batch[0]) - batch[0]).pow(2).mean()
        self.log("loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


trainer = lightning.Trainer(
    accelerator="gpu", devices=1, precision="bf16-mixed", max_steps=1000, logger=False, enable_checkpointing=False
)
trainer.fit(
    Autoencoder(), DataLoader(TensorDataset(torch.randn(16 * options.batch, options.width)), batch_size=options.batch)
)
