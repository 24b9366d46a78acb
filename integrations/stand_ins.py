"""Stand-ins for kernels that have no build for this machine: their shapes, their memory, and their price.

A file of them is given to ``autosac run --stand-in FILE``. Ten lines make one::

    import torch
    from autosac.integrations.stand_ins import stand_in

    def products(x, weight):
        return 2 * x.shape[0] * x.shape[1] * weight.shape[1]

    @stand_in("my_kernels:fused_linear", flops=products)
    def fused_linear(x, weight):
        return x.new_empty(x.shape[0], weight.shape[1])  # what it returns; the body is not priced

The function gets the call's own arguments, its tensors without data, and returns tensors of the right shapes. Its price is

    t = max(flops / (share * peak rate of the first tensor's type), bytes / (share * memory bandwidth)) + a launch

(`autosac.estimator.stand_ins`). Where a kernel's instructions are not the GPU's fastest, `per_cycle` says how many FLOPs one
multiprocessor does in a cycle, in place of the share of the peak rate. `flops` and `nbytes` are numbers, or functions of the
same arguments; by default no FLOPs, and all tensors that go in and come out. The backward takes `backward` times both (2 if
not given), and needs the tensors that went in and came out, as autograd saves them; it returns a gradient for each
floating-point tensor that went in and needs one.

`replace` puts any object in the place of a name; what it calls is priced as it is. `NAMED` holds those that come with AutoSAC.
"""

from __future__ import annotations

import functools
import importlib.abc
import importlib.machinery
import json
import runpy
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, TypeAlias

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils import _pytree as pytree

from autosac.errors import UsageError
from autosac.integrations import hub_kernels

Amount: TypeAlias = "float | Callable[..., float] | None"
_NAMESPACE = "stand_in"
# The first FlashAttention in Triton.
_TRITON_BLOCK = 128
TRITON_PER_CYCLE = 720.0
TRITON_BACKWARD = 2.9
_library = torch.library.Library(_NAMESPACE, "FRAGMENT")
_objects: dict[str, dict[str, Any]] = {}


def stand_in(
    target: str, *, flops: Amount = 0.0, nbytes: Amount = None, backward: float = 2.0, per_cycle: float = 0.0
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Let the decorated function stand for ``"package.module:name"``. See the module's docstring.

    UsageError if the target is not written so, or has a stand-in.
    """

    def register(shapes: Callable[..., Any]) -> Callable[..., Any]:
        name = target.replace(":", "_").replace(".", "_")
        _library.define(f"{name}(Tensor[] inputs, str outputs, float flops, float nbytes, float per_cycle) -> Tensor[]")
        _library.impl(name, lambda inputs, outputs, *_: _made(outputs, inputs[0].device), "CompositeExplicitAutograd")
        kernel = getattr(getattr(torch.ops, _NAMESPACE), name).default

        @functools.wraps(shapes)
        def call(*args: Any, **kwargs: Any) -> Any:
            leaves, spec = pytree.tree_flatten((args, kwargs))
            inputs = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
            shaped = [_without_data(leaf) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
            plain_args, plain_kwargs = pytree.tree_unflatten(shaped, spec)
            out, out_spec = pytree.tree_flatten(shapes(*plain_args, **plain_kwargs))
            moved = sum(t.nbytes for t in (*inputs, *out))
            costs = (
                _amount(flops, 0.0, plain_args, plain_kwargs),
                _amount(nbytes, float(moved), plain_args, plain_kwargs),
            )
            found = _Call.apply(kernel, _described(out), (*costs, per_cycle), backward, *inputs)  # type: ignore[no-untyped-call]
            return pytree.tree_unflatten(list(found), out_spec)

        torch.compiler.allow_in_graph(call)  # for Dynamo an operator, as kernels are
        replace(target, call)
        return call

    return register


def replace(target: str, value: Any) -> None:
    """Let `value` be found as ``"package.module:name"``. UsageError if that is not how it is written, or it is there."""
    module, _, name = target.partition(":")
    if not module or not name.isidentifier():
        raise UsageError(f"stand-in for {target!r}: expected package.module:name")
    names = _objects.setdefault(module, {})
    if name in names:
        raise UsageError(f"{target} has two stand-ins")
    names[name] = value


def load(names: Sequence[str]) -> None:
    """Take the stand-ins of `NAMED`, or of files, and put all of them in their places. UsageError for what is neither."""
    for name in names:
        if name in NAMED:
            NAMED[name]()
        elif Path(name).is_file():
            runpy.run_path(name)
        else:
            raise UsageError(f"--stand-in {name}: there is no such file, and none of: {', '.join(NAMED)}")
    sys.meta_path.insert(0, _Finder())


class _Call(torch.autograd.Function):
    """One call of a kernel, and its backward."""

    @staticmethod
    def forward(ctx: Any, kernel: Any, outputs: str, costs: Any, backward: float, *inputs: torch.Tensor) -> Any:
        """The outputs."""
        found = kernel(list(inputs), outputs, *costs)
        *work, per_cycle = costs
        ctx.save_for_backward(*inputs, *found)
        ctx.call = kernel, [*(backward * amount for amount in work), per_cycle], len(inputs)
        return tuple(found)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        """A gradient for each input that needs one."""
        kernel, costs, count = ctx.call
        saved = ctx.saved_tensors  # once: under checkpointing each reading is a recomputation
        inputs, outputs = saved[:count], saved[count:]
        needed = [x for x, needs in zip(inputs, ctx.needs_input_grad[4:], strict=True) if needs]
        given = [gradient for gradient in gradients if gradient is not None]
        made = iter(kernel([*given, *inputs, *outputs], _described(needed), *costs))
        return (None, None, None, None, *(next(made) if needs else None for needs in ctx.needs_input_grad[4:]))


def _without_data(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")


def _amount(given: Amount, default: float, args: Any, kwargs: Any) -> float:
    return float(default if given is None else given(*args, **kwargs) if callable(given) else given)


def _described(tensors: Sequence[torch.Tensor]) -> str:
    return json.dumps([[list(t.shape), str(t.dtype).removeprefix("torch.")] for t in tensors])


def _made(outputs: str, device: torch.device) -> list[torch.Tensor]:
    return [torch.empty(shape, dtype=getattr(torch, dtype), device=device) for shape, dtype in json.loads(outputs)]


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Makes modules that hold stand-ins, and the packages around them, in the place of any that are installed."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        """Of a module with stand-ins, or around one."""
        if not any(module == name or module.startswith(f"{name}.") for module in _objects):
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def exec_module(self, module: ModuleType) -> None:
        """Put them in."""
        vars(module).update({"__version__": "2.8.3", **_objects.get(module.__name__, {})})


# ---- those that come with AutoSAC ------------------------------------------------------------------------------------


def _flash_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    **_: Any,
) -> torch.Tensor:
    """`flash_attn_func`: PyTorch has the same kernels. (batch, length, heads, size) in and out."""
    hub_kernels.narrow(q, k, v)
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        attended = torch.nn.functional.scaled_dot_product_attention(
            q.transpose(1, 2),
            k.transpose(1, 2),
            v.transpose(1, 2),
            dropout_p=dropout_p,
            scale=softmax_scale,
            is_causal=causal,
            enable_gqa=q.shape[2] != k.shape[2],
        )
    return attended.transpose(1, 2)


def _flash_attention_varlen(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    **_: Any,
) -> torch.Tensor:
    """`flash_attn_varlen_func`: PyTorch has the same kernels. (tokens, heads, size) in and out."""
    hub_kernels.narrow(q, k, v)
    from torch.nn.attention.varlen import varlen_attn

    return varlen_attn(  # type: ignore[return-value]
        *(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k),
        scale=softmax_scale,
        window_size=(window_size[0], 0 if causal else window_size[1]),
        enable_gqa=q.shape[1] != k.shape[1],
    )


def _attended(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
    """What attention returns: (batch, length, heads, size)."""
    return torch.empty_like(q)


def _causal_flops(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: Any = None, causal: bool = False, *_: Any, **__: Any
) -> float:
    """Of both products, in blocks of 128 keys; causal: of blocks that are not masked as a whole."""
    batch, length, heads, size = q.shape
    keys = k.shape[1]
    return 4.0 * batch * heads * length * size * ((keys + _TRITON_BLOCK) / 2 if causal else keys)


def _losses_of_rows(logits: torch.Tensor, labels: torch.Tensor, **_: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """`cross_entropy_loss`: each row's loss and z-loss, in float32. (rows, classes) and (rows,) in, (rows,) twice out."""
    losses = logits.new_empty(logits.shape[0], dtype=torch.float32)
    return losses, torch.empty_like(losses)


def _read_logits(logits: torch.Tensor, labels: torch.Tensor, **_: Any) -> float:
    """Bytes: the forward reads the logits once; the backward, which takes twice as many, reads them and writes gradients."""
    return logits.nbytes


class _FusedCrossEntropy(torch.nn.Module):
    """`flash_attn.losses.cross_entropy.CrossEntropyLoss`: no logits in float32 are kept."""

    def __init__(self, kernel: Callable[..., Any], ignore_index: int = -100, reduction: str = "mean", **_: Any) -> None:
        super().__init__()
        self._kernel, self._ignored, self._reduction = kernel, ignore_index, reduction

    def forward(self, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """The loss of (rows, classes) and (rows,), as `reduction` says."""
        losses, _ = self._kernel(logits, labels)
        if self._reduction == "none":
            return losses  # type: ignore[no-any-return]
        total = losses.sum()
        return total / (labels != self._ignored).sum() if self._reduction == "mean" else total  # type: ignore[no-any-return]


def _flash_attn() -> None:
    def packed(qkv: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        q, k, v = qkv.unbind(2)
        return _flash_attention(q, k, v, *args, **kwargs)

    for module in ("flash_attn", "flash_attn.flash_attn_interface"):
        replace(f"{module}:flash_attn_func", _flash_attention)
        replace(f"{module}:flash_attn_qkvpacked_func", packed)
        replace(f"{module}:flash_attn_varlen_func", _flash_attention_varlen)
    triton = stand_in(
        "flash_attn.flash_attn_triton:flash_attn_func",
        flops=_causal_flops,
        backward=TRITON_BACKWARD,
        per_cycle=TRITON_PER_CYCLE,
    )
    triton(_attended)
    stand_in("flash_attn.ops.triton.cross_entropy:cross_entropy_loss", nbytes=_read_logits)(_losses_of_rows)
    kernel = _objects["flash_attn.ops.triton.cross_entropy"]["cross_entropy_loss"]
    replace("flash_attn.losses.cross_entropy:CrossEntropyLoss", functools.partial(_FusedCrossEntropy, kernel))


def _apex() -> None:
    adam = functools.partial(torch.optim.AdamW, fused=True)
    replace("apex.optimizers:FusedAdam", adam)
    replace("apex.optimizers:FusedSGD", functools.partial(torch.optim.SGD, fused=True))
    for module in ("apex.normalization", "apex.normalization.fused_layer_norm"):
        replace(f"{module}:FusedLayerNorm", torch.nn.LayerNorm)
        replace(f"{module}:FusedRMSNorm", torch.nn.RMSNorm)


def _hub() -> None:
    hub_kernels.install(stand_in, replace, _flash_attention_varlen)


NAMED: dict[str, Callable[[], None]] = {"flash_attn": _flash_attn, "apex": _apex, "kernels": _hub}
"""Packages whose kernels PyTorch has as well."""

WITHOUT: dict[str, str] = {
    "transformer_engine": "take the layers without it (Megatron-Core: get_gpt_layer_local_spec)",
    "xformers": "take torch.nn.functional.scaled_dot_product_attention",
    "bitsandbytes": "take an optimizer of torch.optim, or write stand-ins (--stand-in FILE)",
    "mamba_ssm": "write stand-ins for its kernels (--stand-in FILE)",
    "causal_conv1d": "write stand-ins for its kernels (--stand-in FILE)",
}
"""Packages of kernels that PyTorch has not, and what to do."""
