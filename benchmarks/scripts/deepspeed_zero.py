"""A transformer under DeepSpeed's ZeRO, stages 1 to 3.

deepspeed benchmarks/scripts/deepspeed_zero.py --stage 3 [--layers N] [--width N] [--batch N] [--length N], or under torchrun
"""

import argparse
import time

import deepspeed
import torch
from torch import nn
from torch.nn import functional as F

parser = argparse.ArgumentParser()
parser.add_argument("--stage", type=int, default=2)
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
        logits = self.head(self.layers(self.embedding(tokens)))
        return F.cross_entropy(logits.flatten(0, 1), tokens.flatten())


model = Model()
engine, *_ = deepspeed.initialize(
    model=model,
    model_parameters=model.parameters(),
    config={
        "train_micro_batch_size_per_gpu": options.batch,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": options.stage},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "torch_adam": True}},
        "gradient_clipping": 1.0,
    },
)
begin = time.time()
for step in range(1000):
    loss = engine(torch.randint(0, VOCABULARY, (options.batch, options.length), device=engine.device))
    engine.backward(loss)
    engine.step()
    value, now = loss.item(), time.time()
    if torch.distributed.get_rank() == 0:
        print(f"step {step}: loss {value:.3f}, {1e3 * (now - begin):.1f} ms", flush=True)
    begin = now
