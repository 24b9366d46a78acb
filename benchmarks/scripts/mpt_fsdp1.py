"""An MPT as MosaicML's llm-foundry trains it with Composer: the first FSDP, bfloat16, flash-attn's kernels, AdamW in a loop.

torchrun --nproc-per-node 8 benchmarks/scripts/mpt_fsdp1.py [--layers N] [--width N] [--head N] [--batch N] [--accumulation N]
    [--length N] [--checkpointing] [--attention flash|triton] [--prefetch pre|post] [--float32-reduction] [--keep-gathered]
    [--full-precision]

`--prefetch post` is Composer's default, `pre` also gathers ahead in the forward.
"""

import argparse
import functools
import os
import time

import torch
import torch.distributed as dist
from flash_attn import flash_attn_varlen_func
from flash_attn.flash_attn_triton import flash_attn_func
from flash_attn.losses.cross_entropy import CrossEntropyLoss
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    apply_activation_checkpointing,
    checkpoint_wrapper,
)
from torch.distributed.fsdp import BackwardPrefetch, FullyShardedDataParallel, MixedPrecision, ShardingStrategy
from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy
from torch.nn import functional as F

parser = argparse.ArgumentParser()
parser.add_argument("--layers", type=int, default=32)
parser.add_argument("--width", type=int, default=4096)
parser.add_argument("--head", type=int, default=128)
parser.add_argument("--batch", type=int, default=6)
parser.add_argument("--accumulation", type=int, default=1)
parser.add_argument("--length", type=int, default=2048)
parser.add_argument("--checkpointing", action="store_true")
parser.add_argument("--attention", choices=("flash", "triton"), default="flash")
parser.add_argument("--prefetch", choices=("pre", "post"), default="pre")
parser.add_argument("--float32-reduction", action="store_true")
parser.add_argument("--keep-gathered", action="store_true")
parser.add_argument("--full-precision", action="store_true")
options = parser.parse_args()
VOCABULARY = 50368


class LowPrecisionLayerNorm(nn.LayerNorm):
    def forward(self, x):
        with torch.autocast("cuda", enabled=False):
            x, weight, bias = x.bfloat16(), self.weight.bfloat16(), self.bias.bfloat16()
            return F.layer_norm(x, self.normalized_shape, weight, bias, self.eps)


class Rows(torch.autograd.Function):
    """The rows at these indices; its backward puts gradients back into a tensor of zeros."""

    @staticmethod
    def forward(ctx, x, indices):
        ctx.save_for_backward(indices)
        ctx.rows = len(x)
        return torch.gather(x, 0, indices[:, None].expand(-1, x.shape[1]))

    @staticmethod
    def backward(ctx, gradient):
        (indices,) = ctx.saved_tensors
        found = torch.zeros(ctx.rows, gradient.shape[1], dtype=gradient.dtype, device=gradient.device)
        return found.scatter_(0, indices[:, None].expand(-1, gradient.shape[1]), gradient), None


def without_padding(x, mask):
    """The rows that the mask keeps, where sequences begin, and the longest one: the host reads two numbers."""
    lengths = mask.sum(dim=-1, dtype=torch.int32)
    indices = torch.nonzero(mask.flatten(), as_tuple=False).flatten()
    longest = lengths.max().item()
    starts = F.pad(torch.cumsum(lengths, dim=0, dtype=torch.int32), (1, 0))
    return Rows.apply(x.flatten(0, 1), indices), indices, starts, longest


class Attention(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.heads = width // options.head
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x, mask):
        if options.attention == "triton":
            q, k, v = (part.unflatten(2, (self.heads, options.head)) for part in self.qkv(x).chunk(3, dim=2))
            return self.out(flash_attn_func(q, k, v, causal=True).flatten(2))
        parts = [without_padding(part, mask) for part in self.qkv(x).chunk(3, dim=2)]
        _, indices, starts, longest = parts[0]
        q, k, v = (rows.unflatten(1, (self.heads, options.head)) for rows, *_ in parts)
        attended = flash_attn_varlen_func(q, k, v, starts, starts, longest, longest, causal=True).flatten(1)
        padded = torch.zeros(mask.numel(), attended.shape[1], dtype=attended.dtype, device=attended.device)
        padded[indices] = attended
        return self.out(padded.view_as(x))


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm_1, self.norm_2 = LowPrecisionLayerNorm(width), LowPrecisionLayerNorm(width)
        self.attention = Attention(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x, mask):
        x = x + self.attention(self.norm_1(x), mask)
        return x + self.down(F.gelu(self.up(self.norm_2(x))))


class MPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, options.width)
        self.positions = nn.Embedding(options.length, options.width)
        self.blocks = nn.ModuleList(Block(options.width) for _ in range(options.layers))
        self.norm = LowPrecisionLayerNorm(options.width)

    def forward(self, tokens):
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        mask = torch.ones_like(tokens, dtype=torch.bool)
        for block in self.blocks:
            x = block(x, mask)
        return F.linear(self.norm(x), self.tokens.weight)


dist.init_process_group("nccl")
device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
torch.cuda.set_device(device)
with torch.device("meta"):
    model = MPT()
bfloat16, ahead = torch.bfloat16, options.prefetch == "pre"
reduced = torch.float32 if options.float32_reduction else bfloat16
model = FullyShardedDataParallel(
    model,
    auto_wrap_policy=functools.partial(transformer_auto_wrap_policy, transformer_layer_cls={Block}),
    sharding_strategy=ShardingStrategy.SHARD_GRAD_OP if options.keep_gathered else ShardingStrategy.FULL_SHARD,
    mixed_precision=MixedPrecision(
        param_dtype=None if options.full_precision else bfloat16, reduce_dtype=reduced, buffer_dtype=bfloat16
    ),
    backward_prefetch=BackwardPrefetch.BACKWARD_PRE if ahead else BackwardPrefetch.BACKWARD_POST,
    forward_prefetch=ahead,
    limit_all_gathers=True,
    param_init_fn=lambda module: module.to_empty(device=device, recurse=False),
    device_id=device,
    use_orig_params=True,
)
if options.checkpointing:
    apply_activation_checkpointing(model, checkpoint_wrapper, lambda module: isinstance(module, Block))


@torch.no_grad()
def update_metrics(logits, targets):
    """Composer's metrics of language models, cross entropy and perplexity: each works out the loss again, in float32."""
    for total in totals:
        with torch.autocast("cuda", dtype=bfloat16):
            total += F.cross_entropy(logits, targets, ignore_index=-100, reduction="sum")
        (targets != -100).sum()


totals = [torch.zeros((), device=device) for _ in range(2)]
optimizer = torch.optim.AdamW(model.parameters(), lr=1.2e-4, betas=(0.9, 0.95), weight_decay=0.0, foreach=False)
loss_function = CrossEntropyLoss(ignore_index=-100)
begin = time.time()
for step in range(1000):
    for _ in range(options.accumulation):
        tokens = torch.randint(0, VOCABULARY, (options.batch, options.length)).to(device)
        with torch.autocast("cuda", dtype=bfloat16):
            logits = model(tokens)
            targets = torch.roll(tokens, shifts=-1)
            targets[:, -1] = -100
            loss = loss_function(logits.view(-1, VOCABULARY), targets.view(-1)) / options.accumulation
        loss.backward()
        update_metrics(logits.detach().view(-1, VOCABULARY), targets.view(-1))
    model.clip_grad_norm_(1.0)
    optimizer.step()
    optimizer.zero_grad()
    value, now = loss.item(), time.time()
    if dist.get_rank() == 0:
        speed = options.accumulation * options.batch * options.length / (now - begin)
        print(f"batch {step}: loss {value:.3f}, {1e3 * (now - begin):.1f} ms, {speed:,.0f} tokens/s/GPU", flush=True)
    begin = now
