"""How much of flexible attention its mask leaves to compute.

A mask is a function of positions, of which the compiler's graphs have the operators. It is run on the CPU, for the first batch
and head and for a few tiles of queries: the kernel skips tiles of keys in which no query of a tile has anything to do. What
comes back is compared with a causal mask, tile by tile, so that one has exactly a half:

    share = 1/2 * (tiles that this mask needs) / (tiles that a causal mask needs)

Tensors that a mask reads (the documents of positions) have no values in a capture: they are zeros, one document. If a query
then has nothing to attend to, nothing is known (None): the mask counts as causal.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

COMPUTED = "computed"
"""An argument of flexible attention in traces that is not its own: the share of pairs that its mask leaves to compute."""
_TILE = 128
_TILES = 32  # of queries that are looked at
_CAUSAL, _NEARLY = 0.5, 0.01
_known: dict[tuple[object, ...], float | None] = {}
_OPERATORS = ("flex_attention", "flex_attention_backward")


def share_of(operator: Any, arguments: Sequence[Any]) -> float | None:
    """The share of pairs that a call of flexible attention computes; None for other operators, where it is about that of a
    causal mask, and where nothing is known. Arguments may be an fx node's.
    """
    if str(operator) not in _OPERATORS:
        return None
    blocks = [value for value in arguments if isinstance(value, (tuple, list)) and value and _graph_of(value[-1])]
    if not blocks or not all(isinstance(size, int) for size in blocks[-1][:2]):
        return None
    graph, (queries, keys) = _graph_of(blocks[-1][-1]), blocks[-1][:2]
    assert graph is not None
    key = (graph.code, queries, keys, *map(str, _read(graph)))
    if key not in _known:
        _known[key] = _share(graph, queries, keys)
    share = _known[key]
    return None if share is None or abs(share - _CAUSAL) < _NEARLY else share


def _graph_of(value: Any) -> torch.fx.GraphModule | None:
    """A mask's graph, given or named by a node."""
    if isinstance(value, torch.fx.Node) and value.op == "get_attr":
        value = getattr(value.graph.owning_module, str(value.target), None)
    return value if isinstance(value, torch.fx.GraphModule) else None


def _read(graph: torch.fx.GraphModule) -> list[Any]:
    """What stands for the tensors that a mask reads."""
    return [node.meta.get("val") for node in graph.graph.nodes if node.op == "placeholder"][4:]


def _share(graph: torch.fx.GraphModule, queries: int, keys: int) -> float | None:
    tiles = -(-queries // _TILE)
    chosen = sorted({round(k * (tiles - 1) / max(1, _TILES - 1)) for k in range(_TILES)})
    with _disable_current_modes():
        rows = torch.tensor([[t * _TILE, t * _TILE + _TILE // 2, (t + 1) * _TILE - 1] for t in chosen])
        rows = rows.clamp(max=queries - 1)
        try:
            mask = _values(graph, rows.reshape(-1, 1), torch.arange(keys).reshape(1, -1))
        except Exception:  # a mask of operators that do not run so
            return None
        causal = rows.reshape(-1, 1) >= torch.arange(keys).reshape(1, -1)
        if not mask.any(-1).all():
            return None
        needed, of_causal = (int(_tiles(x, len(chosen)).sum()) for x in (mask, causal))
    return _CAUSAL * needed / of_causal


def _tiles(mask: torch.Tensor, count: int) -> torch.Tensor:
    """Which tiles of keys the queries of each tile need."""
    padded = torch.nn.functional.pad(mask, (0, -mask.shape[1] % _TILE))
    return padded.reshape(count, -1, padded.shape[1] // _TILE, _TILE).any(-1).any(1)


def _values(graph: torch.fx.GraphModule, rows: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
    """The mask at these positions."""
    zero = torch.zeros((), dtype=torch.int64)
    read = [torch.zeros(x.shape, dtype=x.dtype) if isinstance(x, torch.Tensor) else x for x in _read(graph)]
    found = _OnCPU(graph).run(zero, zero, rows, columns, *read)
    return torch.as_tensor(found).broadcast_to(rows.shape[0], columns.shape[1])


class _OnCPU(torch.fx.Interpreter):
    """Runs a graph on the CPU, whatever device it was made for."""

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        """The operator on this device."""
        if "device" in kwargs:
            kwargs = {**kwargs, "device": torch.device("cpu")}
        return super().call_function(target, args, kwargs)
