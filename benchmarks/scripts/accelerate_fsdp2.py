"""A causal language model in an accelerate loop under FSDP2, with or without activation checkpointing by the plugin.

accelerate launch benchmarks/scripts/accelerate_fsdp2.py [--layers N] [--width N] [--checkpointing] [...], or under torchrun
"""

import argparse
import time

import torch
from accelerate import Accelerator, FullyShardedDataParallelPlugin
from torch.utils.data import DataLoader, TensorDataset
from transformers import Qwen2Config, Qwen2ForCausalLM, get_cosine_schedule_with_warmup

parser = argparse.ArgumentParser()
parser.add_argument("--layers", type=int, default=28)
parser.add_argument("--width", type=int, default=3584)
parser.add_argument("--inner", type=int, default=18944)
parser.add_argument("--heads", type=int, default=28)
parser.add_argument("--groups", type=int, default=4)
parser.add_argument("--vocabulary", type=int, default=152064)
parser.add_argument("--batch", type=int, default=1)
parser.add_argument("--length", type=int, default=4096)
parser.add_argument("--checkpointing", action="store_true")
options = parser.parse_args()

plugin = FullyShardedDataParallelPlugin(
    fsdp_version=2,
    auto_wrap_policy="transformer_based_wrap",
    transformer_cls_names_to_wrap=["Qwen2DecoderLayer"],
    activation_checkpointing=options.checkpointing,
)
accelerator = Accelerator(mixed_precision="bf16", fsdp_plugin=plugin)
config = Qwen2Config(
    vocab_size=options.vocabulary,
    hidden_size=options.width,
    intermediate_size=options.inner,
    num_hidden_layers=options.layers,
    num_attention_heads=options.heads,
    num_key_value_heads=options.groups,
    use_cache=False,  # accelerate's checkpointing would fill it a second time
)
model = Qwen2ForCausalLM(config)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
schedule = get_cosine_schedule_with_warmup(optimizer, 100, 1000)
tokens = TensorDataset(torch.randint(0, options.vocabulary, (256, options.length)))
model, optimizer, data, schedule = accelerator.prepare(
    model, optimizer, DataLoader(tokens, batch_size=options.batch, shuffle=True), schedule
)
model.train()
begin = time.perf_counter()
for number, (batch,) in enumerate(data):
    loss = model(input_ids=batch, labels=batch).loss
    accelerator.backward(loss)
    accelerator.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    schedule.step()
    optimizer.zero_grad()
    now = time.perf_counter()
    accelerator.print(f"step {number}: loss {loss.item():.3f}, {1e3 * (now - begin):.1f} ms", flush=True)
    begin = now
