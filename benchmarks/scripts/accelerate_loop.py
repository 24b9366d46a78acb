"""A training loop with Hugging Face's accelerate: mixed precision, accumulation, clipping.

python benchmarks/scripts/accelerate_loop.py [--width N] [--batch N], or under torchrun
"""

import argparse
import time

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--width", type=int, default=4096)
parser.add_argument("--batch", type=int, default=1024)
options = parser.parse_args()

accelerator = Accelerator(mixed_precision="bf16", gradient_accumulation_steps=2)
width = options.width
model = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
data = DataLoader(TensorDataset(torch.randn(16 * options.batch, width)), batch_size=options.batch, shuffle=True)
model, optimizer, data = accelerator.prepare(model, optimizer, data)
accelerator.print(f"{accelerator.num_processes} processes on {accelerator.device}")
begin = time.perf_counter()
for epoch in range(100):
    for (x,) in data:
        with accelerator.accumulate(model):
            loss = (model(x) - x).pow(2).mean()
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        now = time.perf_counter()
        accelerator.print(f"epoch {epoch}: loss {loss.item():.3f}, {1e3 * (now - begin):.3f} ms", flush=True)
        begin = now
