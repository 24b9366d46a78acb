"""Models of several kinds under DeepSpeed: Llama, gpt-oss, ResNet-50, Stable Diffusion's UNet, a graph network.

deepspeed benchmarks/scripts/deepspeed_models.py --model llama2-7b [--stage N] [--batch N] [--length N]
    [--layers N] [--checkpointing], or under torchrun
"""

import argparse
import time

import deepspeed
import torch
from torch import nn
from torch.nn import functional as F

LLAMAS = {  # layers, width, inner width, heads, heads of keys, vocabulary
    "llama2-7b": (32, 4096, 11008, 32, 32, 32000),
    "llama2-13b": (40, 5120, 13824, 40, 40, 32000),
    "llama2-70b": (80, 8192, 28672, 64, 8, 32000),
    "llama3-8b": (32, 4096, 14336, 32, 8, 128256),
    "llama3-70b": (80, 8192, 28672, 64, 8, 128256),
}
parser = argparse.ArgumentParser()
parser.add_argument("--model", choices=(*LLAMAS, "gpt-oss-20b", "resnet-50", "unet", "gat"), default="llama2-7b")
parser.add_argument("--stage", type=int, default=0)
parser.add_argument("--batch", type=int, default=1)
parser.add_argument("--length", type=int, default=2048)
parser.add_argument("--layers", type=int)
parser.add_argument("--checkpointing", action="store_true")
options = parser.parse_args()


class Attend(nn.Module):
    """One layer of graph attention (Velickovic et al., 2018): `heads` heads of `size` over the edges of a graph."""

    def __init__(self, inputs, heads, size):
        super().__init__()
        self.heads, self.size = heads, size
        self.values = nn.Linear(inputs, heads * size, bias=False)
        self.of_source, self.of_target = (nn.Parameter(torch.randn(heads, size) / size) for _ in range(2))

    def forward(self, x, source, target):
        values = self.values(x).view(-1, self.heads, self.size)
        scores = (values * self.of_source).sum(-1)[source] + (values * self.of_target).sum(-1)[target]
        weights = F.leaky_relu(scores, 0.2).exp()
        total = torch.zeros(len(x), self.heads, device=x.device, dtype=x.dtype).index_add_(0, target, weights)
        shares = (weights / (total[target] + 1e-9)).unsqueeze(-1)
        return torch.zeros_like(values).index_add_(0, target, shares * values[source]).flatten(1)


class GAT(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = Attend(602, 8, 64), Attend(512, 1, 41)

    def forward(self, x, source, target, labels):
        return F.cross_entropy(self.second(F.elu(self.first(x, source, target)), source, target), labels)


class Classified(nn.Module):
    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, images, labels):
        return F.cross_entropy(self.model(images).logits, labels)


class Denoised(nn.Module):
    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, latents, times, text, noise):
        return F.mse_loss(self.model(latents, times, text).sample, noise)


def language_model():
    from transformers import GptOssConfig, GptOssForCausalLM, LlamaConfig, LlamaForCausalLM

    if options.model == "gpt-oss-20b":
        model = GptOssForCausalLM(GptOssConfig(num_hidden_layers=options.layers or 24, num_local_experts=32))
    else:
        layers, width, inner, heads, groups, vocabulary = LLAMAS[options.model]
        config = LlamaConfig(
            num_hidden_layers=options.layers or layers,
            hidden_size=width,
            intermediate_size=inner,
            num_attention_heads=heads,
            num_key_value_heads=groups,
            vocab_size=vocabulary,
            max_position_embeddings=options.length,
            use_cache=False,
        )
        model = LlamaForCausalLM(config)
    if options.checkpointing:
        model.gradient_checkpointing_enable()
    return model


def build():
    """The model, and a function that makes its inputs on a device."""
    rows = options.batch
    if options.model == "resnet-50":
        from transformers import ResNetConfig, ResNetForImageClassification

        model = Classified(ResNetForImageClassification(ResNetConfig(num_labels=1000)))
        return model, lambda d: (torch.randn(rows, 3, 224, 224, device=d), torch.randint(0, 1000, (rows,), device=d))
    if options.model == "unet":
        from diffusers import UNet2DConditionModel

        latents, text = (rows, 4, 64, 64), (rows, 77, 768)
        return Denoised(UNet2DConditionModel(cross_attention_dim=768)), lambda d: (
            torch.randn(latents, device=d),
            torch.randint(0, 1000, (rows,), device=d),
            torch.randn(text, device=d),
            torch.randn(latents, device=d),
        )
    if options.model == "gat":
        nodes, edges = 20_000 * rows, 500_000 * rows
        return GAT(), lambda d: (
            torch.randn(nodes, 602, device=d),
            *(torch.randint(0, nodes, (edges,), device=d) for _ in range(2)),
            torch.randint(0, 41, (nodes,), device=d),
        )
    model = language_model()
    return model, lambda d: (torch.randint(0, model.config.vocab_size, (rows, options.length), device=d),)


model, inputs = build()
is_language = hasattr(model, "config")
engine, *_ = deepspeed.initialize(
    model=model,
    model_parameters=model.parameters(),
    config={
        "train_micro_batch_size_per_gpu": options.batch,
        "bf16": {"enabled": is_language},
        "zero_optimization": {"stage": options.stage},
        "optimizer": {"type": "AdamW", "params": {"lr": 5e-5, "torch_adam": True}},
    },
)
begin = time.time()
for step in range(1000):
    given = inputs(engine.device)
    loss = engine(input_ids=given[0], labels=given[0]).loss if is_language else engine(*given)
    engine.backward(loss)
    engine.step()
    torch.cuda.synchronize()
    now = time.time()
    if torch.distributed.get_rank() == 0:
        print(f"iteration {step}: {1e3 * (now - begin):.1f} ms", flush=True)
    begin = now
