"""MosaicML's MPT under PyTorch's first FSDP (FULL_SHARD), as llm-foundry trains it: bfloat16, AdamW, activation checkpointing.

torchrun --nproc-per-node 8 benchmarks/scripts/mpt_fsdp1.py [--layers N] [--width N] [--batch N] [--checkpointing] [...]
"""

import argparse
import functools
import os
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision, ShardingStrategy
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.nn import functional as F

parser = argparse.ArgumentParser()
parser.add_argument("--layers", type=int, default=32)
parser.add_argument("--width", type=int, default=4096)
parser.add_argument("--heads", type=int, default=32)
parser.add_argument("--batch", type=int, default=6)
parser.add_argument("--accumulation", type=int, default=1)
parser.add_argument("--length", type=int, default=2048)
parser.add_argument("--checkpointing", action="store_true")
options = parser.parse_args()
VOCABULARY = 50368


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(width, bias=False), nn.LayerNorm(width, bias=False)
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.up, self.down = nn.Linear(width, 4 * width, bias=False), nn.Linear(4 * width, width, bias=False)

    def forward(self, x):
        batch, length, width = x.shape
        q, k, v = self.qkv(self.norm_1(x)).chunk(3, dim=2)
        q, k, v = (part.view(batch, length, options.heads, -1).transpose(1, 2) for part in (q, k, v))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(F.gelu(self.up(self.norm_2(x))))


class MPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(VOCABULARY, options.width), nn.Embedding(options.length, options.width)
        self.blocks = nn.ModuleList(Block(options.width) for _ in range(options.layers))
        self.norm = nn.LayerNorm(options.width, bias=False)

    def forward(self, tokens):
        x = self.wte(tokens) + self.wpe(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        logits = F.linear(self.norm(x), self.wte.weight)
        return F.cross_entropy(logits.flatten(0, 1), tokens.roll(-1, 1).flatten())


dist.init_process_group("nccl")
torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
model = FullyShardedDataParallel(
    MPT(),
    auto_wrap_policy=ModuleWrapPolicy({Block}),
    sharding_strategy=ShardingStrategy.FULL_SHARD,
    mixed_precision=MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16),
    device_id=torch.cuda.current_device(),
    limit_all_gathers=True,
)
if options.checkpointing:
    is_block = functools.partial(lambda module, of: isinstance(module, of), of=Block)
    apply_activation_checkpointing(model, check_fn=is_block)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, betas=(0.9, 0.95))
begin = time.time()
for step in range(1000):
    for _ in range(options.accumulation):
        tokens = torch.randint(0, VOCABULARY, (options.batch, options.length), device="cuda")
        with torch.autocast("cuda", torch.bfloat16):
            loss = model(tokens) / options.accumulation
        loss.backward()
    model.clip_grad_norm_(1.0)
    optimizer.step()
    optimizer.zero_grad()
    value, now = loss.item(), time.time()
    if dist.get_rank() == 0:
        print(f"step {step}: loss {value:.3f}, {1e3 * (now - begin):.1f} ms", flush=True)
    begin = now
