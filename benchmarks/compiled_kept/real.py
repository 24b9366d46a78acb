"""What compiled modules really save, on the CPU.

The compiler is Inductor up to its kernels: its decompositions, its passes and the partitioner run as they are; the graphs that
come out are run operator by operator. So gradients can be compared bit by bit.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves


def operator_by_operator(graph: Any, inputs: Any) -> Any:
    """A backend of `torch.compile`: see the module's docstring."""
    from torch._functorch import config
    from torch._inductor import compile_fx

    def run_graph(graph: Any, _: Any, **__: Any) -> Any:
        def run(args: list[Any]) -> Any:
            return torch.fx.Interpreter(graph).boxed_run(list(args))

        run._boxed_call = True  # type: ignore[attr-defined]
        return run

    with config.patch(enable_autograd_cache=False):
        return compile_fx.compile_fx(graph, inputs, inner_compile=run_graph)


class Counting:
    """Compiles some modules of a model, and counts the bytes that each of them saves in a forward: of storages that were there
    neither before the model ran nor among the module's arguments.
    """

    def __init__(self, model: nn.Module, names: Sequence[str]) -> None:
        self.saved_bytes: dict[str, int] = {}
        self._known = {_place(tensor) for tensor in (*model.parameters(), *model.buffers())}
        for name in names:
            module = model.get_submodule(name)
            module.compile(backend=operator_by_operator)
            compiled = module._compiled_call_impl
            assert compiled is not None
            module._compiled_call_impl = functools.partial(self._call, name, compiled)

    def _call(self, name: str, compiled: Callable[..., Any], *args: Any) -> Any:
        there = self._known | {_place(tensor) for tensor in _tensors(args)}
        saved: dict[int, Tensor] = {}

        def pack(tensor: Tensor) -> Tensor:
            if _place(tensor) not in there:
                saved[_place(tensor)] = tensor
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            out = compiled(*args)
        for node in _nodes(_tensors(out), _tensors(args)):
            for tensor in getattr(node, "_tensors_no_vc_check", ()):  # those that autograd does not look after
                pack(tensor)
        self.saved_bytes[name] = sum(tensor.untyped_storage().nbytes() for tensor in saved.values())
        return out


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def _place(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _nodes(results: Sequence[Tensor], arguments: Sequence[Tensor]) -> Iterator[Any]:
    """Autograd's nodes between arguments and results."""
    known = {tensor.grad_fn for tensor in arguments}
    waiting: list[Any] = [tensor.grad_fn for tensor in results]
    while waiting:
        node = waiting.pop()
        if node is None or node in known:
            continue
        known.add(node)
        yield node
        waiting += [following for following, _ in node.next_functions]
