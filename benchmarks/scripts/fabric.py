"""A vision transformer's training loop with Lightning Fabric: DDP, mixed precision.

fabric run benchmarks/scripts/fabric.py [--layers N] [--width N] [--batch N], or under torchrun
"""

import argparse
import os
import time

import torch
from lightning.fabric import Fabric
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--layers", type=int, default=32)
parser.add_argument("--width", type=int, default=1280)
parser.add_argument("--batch", type=int, default=64)
options = parser.parse_args()


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        width = options.width
        self.patches = nn.Conv2d(3, width, 14, stride=14)
        layer = nn.TransformerEncoderLayer(width, width // 64, 4 * width, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, options.layers, enable_nested_tensor=False)
        self.head = nn.Linear(width, 1000)

    def forward(self, images):
        return self.head(self.layers(self.patches(images).flatten(2).transpose(1, 2)).mean(1))


fabric = Fabric(accelerator="cuda", devices=int(os.environ.get("LOCAL_WORLD_SIZE", 1)), precision="bf16-mixed")
fabric.launch()
fabric.seed_everything(1)
model = Encoder()
model, optimizer = fabric.setup(model, torch.optim.AdamW(model.parameters(), lr=1e-4))
begin = time.perf_counter()
for step in range(1000):
    images = torch.randn(options.batch, 3, 224, 224, device=fabric.device)
    labels = torch.randint(0, 1000, (options.batch,), device=fabric.device)
    loss = nn.functional.cross_entropy(model(images), labels)
    fabric.backward(loss)
    fabric.clip_gradients(model, optimizer, max_norm=1.0)
    optimizer.step()
    optimizer.zero_grad()
    value, now = loss.item(), time.perf_counter()
    fabric.print(f"step {step}: loss {value:.3f}, {1e3 * (now - begin):.1f} ms", flush=True)
    begin = now
