"""The eras as train specs of TorchTitan's public registry. Importing this module registers them.

TorchTitan imports it as ``job.custom_config_module``; it adds nothing to the configuration.
"""

from __future__ import annotations

import dataclasses
import itertools
import warnings
from collections.abc import Sequence
from functools import partial
from typing import Any, ClassVar
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed._symmetric_memory import enable_symm_mem_for_group
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_api import ReduceScatter
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils import checkpoint
from torchtitan.config import TORCH_DTYPE_MAP, JobConfig
from torchtitan.distributed import NoParallel
from torchtitan.distributed.activation_checkpoint import apply_ac
from torchtitan.distributed.context_parallel import apply_cp_to_attention_module
from torchtitan.distributed.tensor_parallel import maybe_enable_async_tp
from torchtitan.models.attention import ScaledDotProductAttentionWrapper
from torchtitan.models.deepseek_v3 import get_train_spec as deepseek_v3_spec
from torchtitan.models.deepseek_v3.infra import parallelize as deepseek_v3
from torchtitan.models.llama3 import Transformer, TransformerModelArgs
from torchtitan.models.llama3 import get_train_spec as llama3_spec
from torchtitan.models.llama3.infra.parallelize import (
    _op_sac_save_list,
    apply_compile,
    apply_tp,
    disable_fsdp_gradient_division,
)
from torchtitan.models.llama3.infra.parallelize import apply_fsdp as titan_apply_fsdp
from torchtitan.models.moe import MoE, moe
from torchtitan.models.qwen3 import get_train_spec as qwen3_spec
from torchtitan.models.qwen3.infra import parallelize as qwen3
from torchtitan.models.qwen3.model.model import Qwen3Model
from torchtitan.protocols.train_spec import TrainSpec, register_train_spec
from torchtitan.tools.utils import has_cuda_capability

from benchmarks.torchtitan_published.eras import ERAS, NOW, WIDE, Era
from benchmarks.torchtitan_published.inductor import reorder_loops

__all__ = ["JobConfig"]

LLAMA2 = {
    "llama2_7B": TransformerModelArgs(dim=4096, n_layers=32, n_heads=32, vocab_size=32000, rope_theta=10000),
    "llama2_13B": TransformerModelArgs(dim=5120, n_layers=40, n_heads=40, vocab_size=32000, rope_theta=10000),
    "llama2_70B": TransformerModelArgs(
        dim=8192,
        n_layers=80,
        n_heads=64,
        n_kv_heads=8,
        ffn_dim_multiplier=1.3,
        multiple_of=4096,
        vocab_size=32000,
        rope_theta=10000,
    ),
}
"""Flavors that TorchTitan removed in 2024-12; the architecture is Llama 3's."""
FORGE_13B = TransformerModelArgs(
    dim=5120, n_layers=40, n_heads=40, n_kv_heads=8, ffn_dim_multiplier=1.3, multiple_of=256, rope_theta=500000
)
"""KempnerForge's."""


class OwnRMSNorm(nn.RMSNorm):
    """TorchTitan's own, before 2025-03: cast down before the weight."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """See the class."""
        wide = x.float()
        return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)).type_as(x) * self.weight


class CompositeRMSNorm(nn.RMSNorm):
    """``nn.RMSNorm`` before torch 2.9: cast down after the weight."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """See the class."""
        wide = x.float()
        return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True).add_(self.eps)) * self.weight).type_as(x)


_CUDNN = torch.ops.aten._scaled_dot_product_cudnn_attention.default
_ABS = torch.ops.aten.abs.default


class RepeatingAttention(nn.Module):
    """Causal attention over keys and values repeated to all heads; the backend by the priority of that time's PyTorch."""

    _PRIORITY = (
        SDPBackend.FLASH_ATTENTION,
        SDPBackend.EFFICIENT_ATTENTION,
        SDPBackend.MATH,
    )  # cuDNN's came first later

    def __init__(self, era: Era) -> None:
        super().__init__()
        cudnn = era.cudnn_first == "always" or (era.cudnn_first == "on Blackwell" and has_cuda_capability(10, 0))
        self._backends = [SDPBackend.CUDNN_ATTENTION, *self._PRIORITY] if cudnn else list(self._PRIORITY)

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **_: Any) -> torch.Tensor:
        """Inputs: (batch, heads, sequence, head size)."""
        k, v = _repeated(k, q.shape[1]), _repeated(v, q.shape[1])
        with sdpa_kernel(self._backends, set_priority=True):
            return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def _repeated(x: torch.Tensor, heads: int) -> torch.Tensor:
    x = x.transpose(1, 2)
    batch, length, groups, size = x.shape
    if groups < heads:
        x = x[:, :, :, None, :].expand(batch, length, groups, heads // groups, size)
        x = x.reshape(batch, length, heads, size)
    return x.transpose(1, 2)


class EraTransformer(Transformer):
    """TorchTitan's Llama with the norms, attention and logits of an era."""

    era: ClassVar[Era] = NOW
    _norms: ClassVar[dict[str, type[nn.RMSNorm]]] = {"own": OwnRMSNorm, "composite": CompositeRMSNorm}

    def __init__(self, model_args: TransformerModelArgs) -> None:
        super().__init__(model_args)
        kind = self._norms.get(self.era.norm, nn.RMSNorm)
        self.norm = kind(model_args.dim, eps=model_args.norm_eps)
        for block in self.layers.values():
            block.attention_norm = kind(model_args.dim, eps=model_args.norm_eps)
            block.ffn_norm = kind(model_args.dim, eps=model_args.norm_eps)
            if self.era.repeats_kv:
                block.attention.inner_attention = RepeatingAttention(self.era)

    def forward(self, tokens: torch.Tensor, attention_masks: Any = None, positions: Any = None) -> torch.Tensor:
        """Logits (or hidden states, of a pipeline stage)."""
        h = tokens if self.tok_embeddings is None else self.tok_embeddings(tokens)
        blocks: Any = self.layers
        for block in blocks.values():
            h = block(h, self.freqs_cis, attention_masks=attention_masks, positions=positions)
        return self.after_blocks(h)

    def after_blocks(self, h: torch.Tensor) -> torch.Tensor:
        """The final norm, the output layer and, where the era has it, the cast of the logits."""
        h = h if self.norm is None else self.norm(h)
        if self.output is None:
            return h
        return self.output(h).float() if self.era.keeps_logits else self.output(h)


def build_loss(era: Era, job_config: Any, **_: Any) -> Any:
    """Cross-entropy; in chunks of the sequence where the job's description asks for it."""
    chunks = 8 if "chunked loss" in job_config.job.description else 1
    kept: list[torch.Tensor] = []

    def part(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        flat = logits.flatten(0, 1)
        return F.cross_entropy(flat.float() if era.widens_logits else flat, labels.flatten(0, 1), reduction="sum")

    def loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        if era.keeps_logits:
            kept[:] = [logits]  # until the next step's have been made
        if chunks == 1:
            return part(logits, labels)
        pairs = zip(list(logits.chunk(chunks, 1)), list(labels.chunk(chunks, 1)), strict=True)
        total: Any = 0.0
        for logits_chunk, labels_chunk in pairs:
            total += part(logits_chunk, labels_chunk)
        return total

    if job_config.compile.enable and "loss" in job_config.compile.components:
        return torch.compile(loss, backend=job_config.compile.backend)
    return loss


class StreamReduceScatter(ReduceScatter):
    """FSDP2's reduce-scatter with an input from the pool of a stream of its own."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def allocate(self, size: Sequence[Any], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """The input (and the output, which FSDP2 asks for within its reduce-scatter stream)."""
        with self._stream:
            return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> Any:
        """As FSDP2's own."""
        return dist.reduce_scatter_tensor(output_tensor, input_tensor, op=op, group=group, async_op=async_op)


def apply_fsdp(model: nn.Module, era: Era, mesh: Any, job_config: Any, pipelined: bool) -> None:
    """FSDP2 as it was: blocks, and all else in the root group."""
    narrow = "gradients reduced in bf16" in job_config.job.description
    policy = MixedPrecisionPolicy(
        param_dtype=TORCH_DTYPE_MAP[job_config.training.mixed_precision_param],
        reduce_dtype=torch.bfloat16 if narrow else TORCH_DTYPE_MAP[job_config.training.mixed_precision_reduce],
    )
    options: dict[str, Any] = {"mesh": mesh, "mp_policy": policy}
    if job_config.training.enable_cpu_offload:
        options["offload_policy"] = CPUOffloadPolicy()
    reshard = job_config.parallelism.fsdp_reshard_after_forward
    forced = {"always": True, "never": False}.get(reshard)
    blocks: Any = model.layers
    last = len(blocks) - 1
    for i, block in blocks.items():
        after = not pipelined and int(i) < last if forced is None else forced
        fully_shard(block, **options, reshard_after_forward=after)
    # Whatever was asked for, FSDP2 did not reshard its root.
    fully_shard(model, **options, reshard_after_forward=False)
    disable_fsdp_gradient_division(model)
    if era.reduces_in_stream:
        reduce_scatter = StreamReduceScatter(torch.get_device_module(mesh.device_type).Stream())
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.set_custom_reduce_scatter(reduce_scatter)


def enable_async_tp(job_config: Any, mesh: Any) -> None:
    """As TorchTitan did until 2026-01-20 (69cf20759): with symmetric memory, without which Inductor's pass does nothing."""
    maybe_enable_async_tp(job_config, mesh)
    if job_config.parallelism.enable_async_tensor_parallel:
        with warnings.catch_warnings(action="ignore"):
            enable_symm_mem_for_group(mesh.get_group().group_name)


def gather_for_each_layer(model: nn.Module, mesh: Any) -> None:
    """Tensor parallelism whose column-wise layers each gather the sequence, and whose loss sees the whole vocabulary."""
    gathers = partial(ColwiseParallel, input_layouts=Shard(1))
    scatters = partial(RowwiseParallel, output_layouts=Shard(1))
    whole = {
        "tok_embeddings": NoParallel(output_layout=Shard(1)),  # all of it on each GPU
        "norm": SequenceParallel(),
        "output": gathers(output_layouts=Replicate()),
    }
    parallelize_module(model, mesh, whole)
    blocks: Any = model.layers
    for block in blocks.values():
        plan = {name: gathers() for name in (*(f"attention.w{x}" for x in "qkv"), "feed_forward.w1", "feed_forward.w3")}
        plan |= {name: scatters() for name in ("attention.wo", "feed_forward.w2")}
        plan |= {name: SequenceParallel() for name in ("attention_norm", "ffn_norm")}
        parallelize_module(block, mesh, plan)


def parallelize(era: Era, model: nn.Module, parallel_dims: Any, job_config: Any) -> nn.Module:
    """Tensor and context parallelism, checkpointing, compile and FSDP, in TorchTitan's order."""
    if parallel_dims.tp_enabled and era.gathers_for_each_layer:
        gather_for_each_layer(model, parallel_dims.get_mesh("tp"))
    elif parallel_dims.tp_enabled:
        apply_tp(
            model,
            parallel_dims.get_mesh("tp"),
            loss_parallel=not job_config.parallelism.disable_loss_parallel,
            enable_float8_tensorwise_tp=era.float8_tensor_parallel
            and "quantize.linear.float8" in job_config.model.converters
            and "rowwise" not in (job_config.quantize.linear.float8.recipe_name or ""),
            cp_enabled=parallel_dims.cp_enabled,
        )
        enable_async_tp(job_config, parallel_dims.get_mesh("tp"))
    if parallel_dims.cp_enabled:
        blocks: Any = model.layers
        attention = [block.attention.inner_attention for block in blocks.values()]
        apply_cp_to_attention_module(attention, parallel_dims.get_mesh("cp"), "sdpa")
    compiled = job_config.compile.enable and "model" in job_config.compile.components
    if not compiled and "quantize.linear.float8" in job_config.model.converters and era.float8_casts != "anew":
        from benchmarks.torchtitan_published import float8

        float8.put_back(model, float8.Once if era.float8_casts == "once" else float8.WeightOnce)
    if job_config.activation_checkpoint.mode != "none":
        apply_ac(
            model,
            job_config.activation_checkpoint,
            model_compile_enabled=compiled,
            op_sac_save_list=(_op_sac_save_list | ({_ABS} if era.keeps_abs and not compiled else set()))
            - ({_CUDNN} if not era.keeps_cudnn_attention else set()),
            base_folder=job_config.job.dump_folder,
        )
    if compiled:
        apply_compile(model, job_config.compile)
        if era.compiles_whole_model:  # FSDP's hooks split it; what follows the last block's is a graph of its own
            model.after_blocks = torch.compile(model.after_blocks, backend=job_config.compile.backend)
    if not parallel_dims.fsdp_enabled:
        return model
    names = ["dp_replicate", "fsdp"] if parallel_dims.dp_replicate_enabled else ["fsdp"]
    mesh = parallel_dims.get_mesh(names)
    if era.root_group:
        apply_fsdp(model, era, mesh, job_config, parallel_dims.pp_enabled)
    else:
        titan_apply_fsdp(
            model,
            mesh,
            param_dtype=TORCH_DTYPE_MAP[job_config.training.mixed_precision_param],
            reduce_dtype=TORCH_DTYPE_MAP[job_config.training.mixed_precision_reduce],
            pp_enabled=parallel_dims.pp_enabled,
            cpu_offload=job_config.training.enable_cpu_offload,
            reshard_after_forward_policy=job_config.parallelism.fsdp_reshard_after_forward,
        )
    if era.reduces_last_microbatch:
        reduce_with_the_last(model, job_config.training, mesh.size())
    return model


def reduce_with_the_last(model: Any, training: Any, ranks: int) -> None:
    """Keep the gradients of a step's microbatches until the last one's, as FSDP2's users do by hand."""
    count = max(1, training.global_batch_size // (training.local_batch_size * ranks))
    turns = itertools.cycle(range(count))
    model.register_forward_pre_hook(lambda *_: model.set_requires_gradient_sync(next(turns) == count - 1))


class EraQwen3(Qwen3Model):
    """TorchTitan's Qwen3 with the attention of an era."""

    era: ClassVar[Era] = NOW

    def __init__(self, model_args: Any) -> None:
        super().__init__(model_args)
        if self.era.repeats_kv:
            for block in self.layers.values():
                block.attention.inner_attention = RepeatingAttention(self.era)


class ScatteringMoE(MoE):
    """TorchTitan's mixture whose experts' outputs are scattered and added."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Input and output: (batch, sequence, width)."""
        shape = x.shape
        x = x.view(-1, shape[-1])
        scores, chosen, counts = self.router(x, self.expert_bias)
        with torch.no_grad():
            self.tokens_per_expert.add_(counts)
        scores, order, counts = self.reorderer(scores, chosen)
        rows = (order // self.router.top_k).reshape(-1, 1).expand(-1, shape[-1])
        routed = self.experts(torch.gather(x, dim=0, index=rows), counts)
        out = torch.zeros_like(x) if self.shared_experts is None else self.shared_experts(x)
        routed = (routed.to(torch.float32) * scores.reshape(-1, 1)).to(x.dtype)
        return out.scatter_add(dim=0, index=rows, src=routed).reshape(shape)


def put_back_experts(era: Era, model: nn.Module) -> None:
    """Make the mixtures of experts the era's."""
    if not era.pads_experts:
        moe.indices_padding_wrapper = lambda run: run
    for module in model.modules():
        if era.scatters_experts and type(module) is MoE:
            module.__class__ = ScatteringMoE


def parallelize_qwen3(era: Era, model: nn.Module, parallel_dims: Any, job_config: Any) -> nn.Module:
    """As TorchTitan's own, with q and k gathered after their norms where the era did so."""
    put_back_experts(era, model)
    sequence_parallel = qwen3.SequenceParallel

    def style(*, sequence_dim: int = 1) -> Any:
        gathers = era.gathers_qk_norms and sequence_dim == 2
        return NoParallel(use_local_output=False) if gathers else sequence_parallel(sequence_dim=sequence_dim)

    with mock.patch.object(qwen3, "SequenceParallel", style):
        model = qwen3.parallelize_qwen3(model, parallel_dims, job_config)
    if era.compiles_experts and job_config.compile.enable:
        for module in model.modules():
            if isinstance(module, MoE):
                module.compile(backend=job_config.compile.backend)
    return model


def _llama_spec(era: Era) -> TrainSpec:
    spec = llama3_spec()
    return dataclasses.replace(
        spec,
        model_cls=_of_era(EraTransformer, era),
        model_args={**spec.model_args, **LLAMA2, "13B": FORGE_13B},
        parallelize_fn=partial(parallelize, era),
        build_loss_fn=partial(build_loss, era),
    )


def _qwen3_spec(era: Era) -> TrainSpec:
    parallel = partial(parallelize_qwen3, era)
    return dataclasses.replace(qwen3_spec(), model_cls=_of_era(EraQwen3, era), parallelize_fn=parallel)


def recompute_what_was_not_kept() -> None:
    """Selective checkpointing of before torch 2.13, which looked for nothing but what it kept when it recomputed.

    Since then it refuses operators that the forward did not run, and so experts with FSDP groups of their own: their gathers,
    which the forward starts before the block, start inside it in the recomputation.
    """
    mode: Any = checkpoint._CachedTorchDispatchMode
    known = mode.__torch_dispatch__
    if getattr(known, "recomputes", False):
        return

    def dispatch(self: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        try:
            return known(self, func, types, args, kwargs)
        except RuntimeError as e:
            if "not found in storage" not in str(e):
                raise
            return func(*args, **(kwargs or {}))

    dispatch.recomputes = True  # type: ignore[attr-defined]
    mode.__torch_dispatch__ = dispatch


def parallelize_deepseek_v3(era: Era, model: nn.Module, parallel_dims: Any, job_config: Any) -> nn.Module:
    """As TorchTitan's; where the era did so, attention is never cuDNN's and selective checkpointing keeps no all-to-all."""
    recompute_what_was_not_kept()
    put_back_experts(era, model)
    if not era.deepseek_flex:
        for module in model.modules():
            if isinstance(module, ScaledDotProductAttentionWrapper):
                module.sdpa_backends = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
    kept = deepseek_v3._op_sac_save_list
    if not era.keeps_all_to_all:
        kept = kept - {torch.ops._c10d_functional.all_to_all_single.default}
    with mock.patch.object(deepseek_v3, "_op_sac_save_list", kept):
        return deepseek_v3.parallelize_deepseekv3(model, parallel_dims, job_config)


def _deepseek_v3_spec(era: Era) -> TrainSpec:
    """With the era's attention."""
    spec = dataclasses.replace(deepseek_v3_spec(), parallelize_fn=partial(parallelize_deepseek_v3, era))
    flavors: dict[str, Any] = dict(spec.model_args)
    if not era.deepseek_flex:
        flavors = {
            name: dataclasses.replace(flavor, attn_type="sdpa", attn_mask_type="causal")
            for name, flavor in flavors.items()
        }
    flavors |= {f"{name}{WIDE}": dataclasses.replace(flavor, vocab_size=129280) for name, flavor in flavors.items()}
    return dataclasses.replace(spec, model_args=flavors)


def _of_era(model: type[nn.Module], era: Era) -> Any:
    return type(f"{model.__name__}_{era.name.replace('-', '_')}", (model,), {"era": era})


def _compiled_as_then(era: Era, spec: TrainSpec) -> TrainSpec:
    """With the fusions of the era's Inductor."""
    parallel = spec.parallelize_fn

    def parallelize_fn(*args: Any, **kwargs: Any) -> Any:
        reorder_loops(era.reorders_loops)
        return parallel(*args, **kwargs)

    return dataclasses.replace(spec, parallelize_fn=parallelize_fn)


_FAMILIES = {"llama3": _llama_spec, "qwen3": _qwen3_spec, "deepseek_v3": _deepseek_v3_spec}
for _era in ERAS:
    if _era is not NOW:
        for _family, _spec in _FAMILIES.items():
            register_train_spec(_era.model(_family), _compiled_as_then(_era, _spec(_era)))
