"""A training script in the shape of nanoGPT's train.py: compile, autocast, GradScaler, DDP, gradient accumulation, MFU.

python benchmarks/scripts/nanogpt.py [--layers N] [--width N] [...], or under torchrun. It needs no data: batches come from a
file of random tokens, as nanoGPT reads them.
"""

import argparse
import contextlib
import inspect
import math
import os
import pathlib
import tempfile
import time

import numpy as np
import torch
from torch import nn
from torch.distributed import destroy_process_group, init_process_group
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

parser = argparse.ArgumentParser()
parser.add_argument("--layers", type=int, default=12)
parser.add_argument("--heads", type=int, default=12)
parser.add_argument("--width", type=int, default=768)
parser.add_argument("--batch", type=int, default=12)
parser.add_argument("--length", type=int, default=1024)
parser.add_argument("--accumulation", type=int, default=5)
parser.add_argument("--dtype", default="bfloat16")
parser.add_argument("--no-compile", action="store_true")
parser.add_argument("--iterations", type=int, default=600000)
parser.add_argument("--eval-interval", type=int, default=2000)
parser.add_argument("--eval-iterations", type=int, default=2)
options = parser.parse_args()
VOCABULARY = 50304


class LayerNorm(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x):
        return F.layer_norm(x, self.weight.shape, self.weight, None, 1e-5)


class Attention(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.c_attn, self.c_proj = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.heads = heads

    def forward(self, x):
        batch, length, width = x.size()
        q, k, v = (
            part.view(batch, length, self.heads, width // self.heads).transpose(1, 2)
            for part in self.c_attn(x).split(width, dim=2)
        )
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=None, dropout_p=0, is_causal=True)
        return self.c_proj(y.transpose(1, 2).contiguous().view(batch, length, width))


class Block(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.ln_1, self.attn, self.ln_2 = LayerNorm(width), Attention(width, heads), LayerNorm(width)
        self.c_fc, self.c_proj = nn.Linear(width, 4 * width, bias=False), nn.Linear(4 * width, width, bias=False)

    def forward(self, x):
        x = x + self.attn(self.ln_1(x))
        return x + self.c_proj(F.gelu(self.c_fc(self.ln_2(x))))


class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(VOCABULARY, options.width), nn.Embedding(options.length, options.width)
        self.h = nn.ModuleList(Block(options.width, options.heads) for _ in range(options.layers))
        self.ln_f = LayerNorm(options.width)
        self.lm_head = nn.Linear(options.width, VOCABULARY, bias=False)
        self.wte.weight = self.lm_head.weight
        self.apply(self._init_weights)

    def _init_weights(self, module):
        if isinstance(module, (nn.Linear, nn.Embedding)):
            nn.init.normal_(module.weight, mean=0.0, std=0.02)

    def forward(self, idx, targets):
        x = self.wte(idx) + self.wpe(torch.arange(0, idx.size(1), dtype=torch.long, device=idx.device))
        for block in self.h:
            x = block(x)
        logits = self.lm_head(self.ln_f(x))
        return logits, F.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1), ignore_index=-1)

    def configure_optimizers(self, device_type):
        parameters = [p for p in self.parameters() if p.requires_grad]
        groups = [
            {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": 0.1},
            {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
        ]
        fused = "fused" in inspect.signature(torch.optim.AdamW).parameters and device_type == "cuda"
        return torch.optim.AdamW(groups, lr=6e-4, betas=(0.9, 0.95), **({"fused": True} if fused else {}))

    def estimate_mfu(self, sequences, dt):
        n = sum(p.numel() for p in self.parameters()) - self.wpe.weight.numel()
        flops_per_token = 6 * n + 12 * options.layers * options.width * options.length
        return flops_per_token * options.length * sequences / dt / 312e12


ddp = int(os.environ.get("RANK", -1)) != -1
accumulation = options.accumulation
if ddp:
    init_process_group(backend="nccl")
    local_rank, world_size = int(os.environ["LOCAL_RANK"]), int(os.environ["WORLD_SIZE"])
    device = f"cuda:{local_rank}"
    torch.cuda.set_device(device)
    master = int(os.environ["RANK"]) == 0
    assert accumulation % world_size == 0
    accumulation //= world_size
else:
    device, world_size, master = "cuda", 1, True

torch.manual_seed(1337)
torch.backends.cuda.matmul.allow_tf32 = True
torch.backends.cudnn.allow_tf32 = True
device_type = "cuda" if "cuda" in device else "cpu"
ptdtype = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}[options.dtype]
context = contextlib.nullcontext() if device_type == "cpu" else torch.amp.autocast(device_type, dtype=ptdtype)
folder = pathlib.Path(tempfile.mkdtemp())
path = folder / "train.bin"
np.random.default_rng(0).integers(0, VOCABULARY, 200_000, dtype=np.uint16).tofile(path)


def get_batch():
    data = np.memmap(path, dtype=np.uint16, mode="r")
    ix = torch.randint(len(data) - options.length, (options.batch,))
    x = torch.stack([torch.from_numpy(data[i : i + options.length].astype(np.int64)) for i in ix])
    y = torch.stack([torch.from_numpy(data[i + 1 : i + 1 + options.length].astype(np.int64)) for i in ix])
    if device_type == "cuda":
        return x.pin_memory().to(device, non_blocking=True), y.pin_memory().to(device, non_blocking=True)
    return x.to(device), y.to(device)


model = GPT()
print(f"number of parameters: {sum(p.numel() for p in model.parameters()) / 1e6:.2f}M")
model.to(device)
scaler = torch.amp.GradScaler("cuda", enabled=(options.dtype == "float16"))
optimizer = model.configure_optimizers(device_type)
if not options.no_compile:
    model = torch.compile(model)
if ddp:
    model = DDP(model, device_ids=[local_rank])
raw_model = model.module if ddp else model


@torch.no_grad()
def estimate_loss():
    model.eval()
    losses = torch.zeros(options.eval_iterations)
    for k in range(options.eval_iterations):
        x, y = get_batch()
        with context:
            _, loss = model(x, y)
        losses[k] = loss.item()
    model.train()
    return losses.mean()


def get_lr(it):
    return 6e-5 + 0.5 * (1.0 + math.cos(math.pi * min(1.0, it / 600000))) * (6e-4 - 6e-5)


x, y = get_batch()
t0, running_mfu, iteration = time.time(), -1.0, 0
while True:
    for group in optimizer.param_groups:
        group["lr"] = get_lr(iteration)
    if iteration % options.eval_interval == 0 and master:
        print(f"step {iteration}: val loss {estimate_loss():.4f}")
        torch.save({"model": raw_model.state_dict(), "optimizer": optimizer.state_dict()}, folder / "ckpt.pt")
    for micro_step in range(accumulation):
        if ddp:
            model.require_backward_grad_sync = micro_step == accumulation - 1
        with context:
            logits, loss = model(x, y)
            loss = loss / accumulation
        x, y = get_batch()
        scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad(set_to_none=True)
    t1 = time.time()
    dt, t0 = t1 - t0, t1
    if master:
        lossf = loss.item() * accumulation
        mfu = getattr(raw_model, "_orig_mod", raw_model).estimate_mfu(options.batch * accumulation, dt)
        running_mfu = mfu if running_mfu == -1.0 else 0.9 * running_mfu + 0.1 * mfu
        print(f"iter {iteration}: loss {lossf:.4f}, time {dt * 1000:.2f}ms, mfu {running_mfu * 100:.2f}%")
    iteration += 1
    if iteration > options.iterations:
        break
if ddp:
    destroy_process_group()
