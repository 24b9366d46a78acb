"""Hugging Face's Trainer with a Llama from a configuration: alone, with DDP or with FSDP2, with or without checkpointing.

python benchmarks/scripts/hf_trainer.py [--fsdp] [--checkpointing] [--layers N] [--width N] [...], or under torchrun
"""

import argparse
import os
import tempfile

import torch
from torch.utils.data import Dataset
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

parser = argparse.ArgumentParser()
parser.add_argument("--layers", type=int, default=32)
parser.add_argument("--width", type=int, default=4096)
parser.add_argument("--inner", type=int, default=14336)
parser.add_argument("--heads", type=int, default=32)
parser.add_argument("--vocabulary", type=int, default=128256)
parser.add_argument("--batch", type=int, default=1)
parser.add_argument("--length", type=int, default=4096)
parser.add_argument("--accumulation", type=int, default=1)
parser.add_argument("--fsdp", action="store_true")
parser.add_argument("--checkpointing", action="store_true")
options = parser.parse_args()


class Tokens(Dataset):
    def __len__(self):
        return 10_000

    def __getitem__(self, index):
        tokens = torch.randint(0, options.vocabulary, (options.length,))
        return {"input_ids": tokens, "labels": tokens}


config = LlamaConfig(
    vocab_size=options.vocabulary,
    hidden_size=options.width,
    intermediate_size=options.inner,
    num_hidden_layers=options.layers,
    num_attention_heads=options.heads,
    num_key_value_heads=max(1, options.heads // 4),
    max_position_embeddings=options.length,
)
model = LlamaForCausalLM(config)
if options.checkpointing:
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
os.environ["FSDP_VERSION"] = "2"  # as `accelerate launch` does: TrainingArguments has no field for it in every release
sharding = {
    "fsdp": "full_shard auto_wrap",
    "fsdp_config": {"version": 2, "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"]},
}
arguments = TrainingArguments(
    output_dir=tempfile.mkdtemp(),
    per_device_train_batch_size=options.batch,
    gradient_accumulation_steps=options.accumulation,
    max_steps=1000,
    logging_steps=1,
    bf16=True,
    report_to=[],
    save_strategy="no",
    **(sharding if options.fsdp else {}),
)
Trainer(model=model, args=arguments, train_dataset=Tokens()).train()
