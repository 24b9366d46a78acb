"""A diffusion model's training loop with diffusers and accelerate: a UNet (Stable Diffusion's) or a DiT.

accelerate launch benchmarks/scripts/diffusers_loop.py [--model unet|dit] [--small] [--batch N], or under torchrun
"""

import argparse
import time

import torch
from accelerate import Accelerator
from diffusers import DDPMScheduler, DiTTransformer2DModel, UNet2DConditionModel
from torch.nn import functional as F

parser = argparse.ArgumentParser()
parser.add_argument("--model", choices=("unet", "dit"), default="unet")
parser.add_argument("--small", action="store_true")
parser.add_argument("--batch", type=int, default=16)
options = parser.parse_args()

accelerator = Accelerator(mixed_precision="bf16")
if options.model == "dit":
    sizes = (
        {"num_layers": 2, "num_attention_heads": 2} if options.small else {"num_layers": 28, "num_attention_heads": 16}
    )
    model = DiTTransformer2DModel(attention_head_dim=72, out_channels=8, **sizes)
else:
    sizes = {"block_out_channels": (32, 64), "cross_attention_dim": 64, "norm_num_groups": 8, "attention_head_dim": 8}
    blocks = {
        "down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"),
        "up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D"),
    }
    model = UNet2DConditionModel(**(sizes | blocks if options.small else {"cross_attention_dim": 768}))
    model.enable_gradient_checkpointing()
noise_schedule = DDPMScheduler(num_train_timesteps=1000)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
model, optimizer = accelerator.prepare(model, optimizer)
size = 32 if options.model == "dit" else 64
begin = time.perf_counter()
for step in range(1000):
    latents = torch.randn(options.batch, 4, size, size, device=accelerator.device)
    noise = torch.randn_like(latents)
    times = torch.randint(0, 1000, (options.batch,), device=accelerator.device).long()
    noisy = noise_schedule.add_noise(latents, noise, times)
    if options.model == "dit":
        labels = torch.randint(0, 1000, (options.batch,), device=accelerator.device)
        found = model(noisy, timestep=times, class_labels=labels).sample[:, :4]
    else:
        text = torch.randn(options.batch, 77, 64 if options.small else 768, device=accelerator.device)
        found = model(noisy, times, text).sample
    loss = F.mse_loss(found.float(), noise)
    accelerator.backward(loss)
    accelerator.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    now = time.perf_counter()
    accelerator.print(f"step {step}: loss {loss.item():.3f}, {1e3 * (now - begin):.1f} ms", flush=True)
    begin = now
