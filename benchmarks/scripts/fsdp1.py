"""A transformer under the first FSDP, `FullyShardedDataParallel`, in bfloat16, its blocks wrapped by class.

torchrun --nproc-per-node 8 benchmarks/scripts/fsdp1.py [--strategy FULL_SHARD] [--layers N] [--width N] [...]
"""

import argparse
import functools
import os
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision, ShardingStrategy
from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy
from torch.nn import functional as F

parser = argparse.ArgumentParser()
parser.add_argument("--strategy", default="FULL_SHARD")
parser.add_argument("--layers", type=int, default=24)
parser.add_argument("--width", type=int, default=2048)
parser.add_argument("--batch", type=int, default=2)
parser.add_argument("--length", type=int, default=2048)
options = parser.parse_args()
VOCABULARY = 50304


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        batch, length, width = x.shape
        q, k, v = self.qkv(self.norm_1(x)).view(batch, length, 3, width // 64, 64).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(F.gelu(self.up(self.norm_2(x))))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, options.width)
        self.layers = nn.Sequential(*(Block(options.width) for _ in range(options.layers)))
        self.head = nn.Linear(options.width, VOCABULARY, bias=False)

    def forward(self, tokens):
        return self.head(self.layers(self.embedding(tokens)))


dist.init_process_group("nccl")
device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
torch.cuda.set_device(device)
bfloat16 = torch.bfloat16
model = FullyShardedDataParallel(
    Model(),
    auto_wrap_policy=functools.partial(transformer_auto_wrap_policy, transformer_layer_cls={Block}),
    mixed_precision=MixedPrecision(param_dtype=bfloat16, reduce_dtype=bfloat16, buffer_dtype=bfloat16),
    sharding_strategy=ShardingStrategy[options.strategy],
    device_id=device,
    use_orig_params=True,
)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
begin = time.perf_counter()
for step in range(1000):
    tokens = torch.randint(0, VOCABULARY, (options.batch, options.length), device=device)
    loss = F.cross_entropy(model(tokens).flatten(0, 1).float(), tokens.flatten())
    loss.backward()
    model.clip_grad_norm_(1.0)
    optimizer.step()
    optimizer.zero_grad()
    value, now = loss.item(), time.perf_counter()
    if dist.get_rank() == 0:
        print(f"step {step}: loss {value:.3f}, {1e3 * (now - begin):.2f} ms", flush=True)
    begin = now
