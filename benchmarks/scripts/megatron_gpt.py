"""Megatron-Core's GPT with its local layer specification: tensor and pipeline parallelism, experts, distributed optimizer.

torchrun --nproc-per-node 8 benchmarks/scripts/megatron_gpt.py [--tensor N] [--pipeline N] [--experts N] [--layers N]
    [--llama] [...]
"""

import argparse
import os
import time

import torch
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.pipeline_parallel.schedules import get_forward_backward_func
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.transformer_config import TransformerConfig

parser = argparse.ArgumentParser()
parser.add_argument("--tensor", type=int, default=2)
parser.add_argument("--pipeline", type=int, default=1)
parser.add_argument("--experts", type=int)
parser.add_argument("--expert-parallel", type=int, default=1)
parser.add_argument("--recompute", action="store_true")
parser.add_argument("--layers", type=int, default=24)
parser.add_argument("--width", type=int, default=2048)
parser.add_argument("--heads", type=int, default=16)
parser.add_argument("--groups", type=int)
parser.add_argument("--inner", type=int)
parser.add_argument("--batch", type=int, default=2)
parser.add_argument("--microbatches", type=int, default=4)
parser.add_argument("--length", type=int, default=2048)
parser.add_argument("--vocabulary", type=int, default=50304)
parser.add_argument("--llama", action="store_true", help="RMSNorm, SwiGLU, rotary positions, and no biases")
options = parser.parse_args()
VOCABULARY = options.vocabulary

torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
torch.distributed.init_process_group("nccl")
parallel_state.initialize_model_parallel(
    tensor_model_parallel_size=options.tensor,
    pipeline_model_parallel_size=options.pipeline,
    expert_model_parallel_size=options.expert_parallel,
)
model_parallel_cuda_manual_seed(123)
config = TransformerConfig(
    num_layers=options.layers,
    hidden_size=options.width,
    num_attention_heads=options.heads,
    num_query_groups=options.groups,
    ffn_hidden_size=options.inner,
    pipeline_model_parallel_size=options.pipeline,
    num_moe_experts=options.experts,
    expert_model_parallel_size=options.expert_parallel,
    moe_token_dispatcher_type="alltoall" if options.experts else "allgather",
    add_bias_linear=options.experts is None and not options.llama,
    normalization="RMSNorm" if options.llama else "LayerNorm",
    gated_linear_unit=options.llama,
    activation_func=torch.nn.functional.silu if options.llama else torch.nn.functional.gelu,
    recompute_granularity="full" if options.recompute else None,
    recompute_method="uniform" if options.recompute else None,
    recompute_num_layers=1 if options.recompute else None,
    tensor_model_parallel_size=options.tensor,
    bf16=True,
    params_dtype=torch.bfloat16,
    pipeline_dtype=torch.bfloat16,
    bias_activation_fusion=False,
    bias_dropout_fusion=False,
    masked_softmax_fusion=False,
    gradient_accumulation_fusion=False,
)
gpt = GPTModel(
    config=config,
    transformer_layer_spec=get_gpt_layer_local_spec(
        num_experts=options.experts, normalization="RMSNorm" if options.llama else "LayerNorm"
    ),
    position_embedding_type="rope" if options.llama else "learned_absolute",
    vocab_size=VOCABULARY,
    max_sequence_length=options.length,
    pre_process=parallel_state.is_pipeline_first_stage(),
    post_process=parallel_state.is_pipeline_last_stage(),
)
model = DistributedDataParallel(
    config=config,
    ddp_config=DistributedDataParallelConfig(use_distributed_optimizer=True),
    module=Float16Module(config, gpt.cuda()),
)
optimizer = get_megatron_optimizer(
    OptimizerConfig(optimizer="adam", lr=1e-4, bf16=True, params_dtype=torch.bfloat16, use_distributed_optimizer=True),
    [model],
)


def batches():
    while True:
        yield torch.randint(0, VOCABULARY, (options.batch, options.length), device="cuda")


def forward_step(iterator, module):
    tokens = next(iterator)
    positions = torch.arange(options.length, device="cuda").expand(options.batch, -1)
    mask = torch.tril(torch.ones(1, 1, options.length, options.length, device="cuda")) < 0.5
    losses = module(tokens, positions, mask, labels=tokens)
    return losses, lambda found: (found.float().mean(), {"loss": found.float().mean().detach()})


data = batches()
for iteration in range(1000):
    begin = time.time()
    model.zero_grad_buffer()
    optimizer.zero_grad()
    losses = get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=data,
        model=model,
        num_microbatches=options.microbatches,
        seq_length=options.length,
        micro_batch_size=options.batch,
        forward_only=False,
    )
    _, norm, _ = optimizer.step()
    torch.cuda.synchronize()
    loss = f", loss {losses[0]['loss'].item():.3f}" if losses else ""
    print(f"step {iteration}: {1e3 * (time.time() - begin):.2f} ms{loss}", flush=True)
