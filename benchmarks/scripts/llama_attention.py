"""Llama-3.2-1B of Hugging Face in bfloat16, with a chosen attention kernel: forward, backward and SGD.

python benchmarks/scripts/llama_attention.py [--batch N] [--length N] [--backend CUDNN_ATTENTION] [--layers N]
"""

import argparse
import time

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import LlamaConfig, LlamaForCausalLM

parser = argparse.ArgumentParser()
parser.add_argument("--layers", type=int, default=16)
parser.add_argument("--batch", type=int, default=6)
parser.add_argument("--length", type=int, default=2048)
parser.add_argument("--backend", default="CUDNN_ATTENTION")
options = parser.parse_args()
torch.set_default_device("cuda")
torch.set_default_dtype(torch.bfloat16)
scaling = {"factor": 32.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0, "original_max_position_embeddings": 8192}
config = LlamaConfig(
    vocab_size=128256,
    hidden_size=2048,
    intermediate_size=8192,
    num_hidden_layers=options.layers,
    num_attention_heads=32,
    num_key_value_heads=8,
    head_dim=64,
    max_position_embeddings=131072,
    rope_theta=500000.0,
    rope_scaling={"rope_type": "llama3", **scaling},
    tie_word_embeddings=True,
)
model = LlamaForCausalLM(config).train()
loss_function = torch.nn.CrossEntropyLoss()
optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
embedded = torch.randn(options.batch, options.length, config.hidden_size)
mask = torch.ones(options.batch, options.length, dtype=torch.int64)
target = torch.randint(2, config.vocab_size - 2, (options.batch, options.length))


def train(steps):
    for _ in range(steps):
        logits = model(inputs_embeds=embedded, attention_mask=mask).logits
        loss = loss_function(logits.view(-1, config.vocab_size), target.view(-1))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


with sdpa_kernel([getattr(SDPBackend, options.backend)]):
    while True:
        torch.cuda.synchronize()
        begin = time.time()
        train(10)
        torch.cuda.synchronize()
        print(f"{1e2 * (time.time() - begin):.2f} ms an iteration", flush=True)
