"""Forward and backward of a Hugging Face Llama-3.2-1B in bfloat16, timed with CUDA events; there is no optimizer.

python benchmarks/scripts/llama_forward_backward.py [--batch N] [--length N]
(under autosac run with --step-marker train_step)
"""

import argparse

import torch
from transformers import LlamaConfig, LlamaForCausalLM

parser = argparse.ArgumentParser()
parser.add_argument("--layers", type=int, default=16)
parser.add_argument("--batch", type=int, default=6)
parser.add_argument("--length", type=int, default=2048)
options = parser.parse_args()
config = LlamaConfig(
    vocab_size=128256,
    hidden_size=2048,
    intermediate_size=8192,
    num_hidden_layers=options.layers,
    num_attention_heads=32,
    num_key_value_heads=8,
    head_dim=64,
    tie_word_embeddings=True,
)
model = LlamaForCausalLM(config).to("cuda", torch.bfloat16)
start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)


def train_step():
    tokens = torch.randint(0, config.vocab_size, (options.batch, options.length), device="cuda")
    start.record()
    model(input_ids=tokens, labels=tokens).loss.backward()
    end.record()
    torch.cuda.synchronize()
    model.zero_grad()


for number in range(100):
    train_step()
    peak = torch.cuda.max_memory_allocated() / 2**30
    print(f"step {number}: {start.elapsed_time(end):.2f} ms, {peak:.2f} GiB", flush=True)
