"""Patches that only save time: none changes a row of a trace, and each steps aside where PyTorch is not as it expects.

In the capture process only. What they cost without: 70B on 64 ranks, share of the capture.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
from collections.abc import Callable, Hashable, Iterator
from types import SimpleNamespace
from typing import Any

import torch.distributed as dist

from autosac.capture.patches import shardings
from autosac.capture.record.recorder import Recorder


def install(recorder: Recorder) -> None:
    """All of them."""
    install_dispatch_rules()
    if dist.is_available():
        faster_strided_shard_flags()
        _foreach_strategies()
        shardings.install()
        _random_regions(recorder)


def install_dispatch_rules() -> None:
    """C++ asks this function at every call of a dispatch mode; it holds the function, so its code is replaced. 5 %."""
    import torch._library.simple_registry as registry

    holder = getattr(registry.SimpleOperatorEntry("aten::none"), "torch_dispatch_rules", None)
    if not (isinstance(getattr(registry.singleton, "_data", None), dict) and hasattr(holder, "_data")):
        return

    def find(op: Any, torch_dispatch_class: type) -> Any:
        entry = singleton._data.get(op.__qualname__)  # type: ignore[name-defined] # noqa: F821
        return None if entry is None else entry.torch_dispatch_rules._data.get(torch_dispatch_class)

    registry.find_torch_dispatch_rule.__code__ = find.__code__


def faster_strided_shard_flags() -> None:
    """Torch 2.13 looks for strided shards among all arguments of a foreach operator once per tensor, which is quadratic.

    Once per operator is enough (half of the time to capture a 70B model's first step). It asks whether strided shards
    carry a flag, and whether all carry the same: one shard for each flag is enough.
    """
    sharding_prop: Any = importlib.import_module("torch.distributed.tensor._sharding_prop")
    original = getattr(sharding_prop, "_propagate_use_strided_shard_flag", None)
    if original is None:
        return

    def propagate(op_strategy: Any, op_schema: Any) -> None:
        known = op_schema.__dict__.get("_autosac_strided")
        if known is None:
            strided = [
                s for s in op_schema.args_spec if any(isinstance(p, sharding_prop._StridedShard) for p in s.placements)
            ]
            telling = {s.use_strided_shard_as_shard_order: s for s in reversed(strided)}
            known = op_schema.__dict__["_autosac_strided"] = SimpleNamespace(args_spec=tuple(telling.values()))
        if known.args_spec:
            original(op_strategy, known)

    sharding_prop._propagate_use_strided_shard_flag = propagate


def _foreach_strategies() -> None:
    """DTensor plans foreach operators and fused optimizers element by element; here each distinct element once. 8 %."""
    from torch.distributed.tensor._op_schema import OpSchema, TupleStrategy

    sharding_prop: Any = importlib.import_module("torch.distributed.tensor._sharding_prop")
    original: Callable[..., Callable[..., Any]] | None = getattr(
        sharding_prop, "_expand_single_dim_strategy_to_mesh", None
    )
    expected = ["mesh", "op_schema", "strategy_info", "output_tensor_meta"]
    if original is None or list(inspect.signature(original).parameters) != expected:
        return

    def expand(mesh: Any, op_schema: Any, strategy_info: Any, output_tensor_meta: Any) -> Callable[..., Any]:
        elements = elements_of_lists(op_schema, TupleStrategy, output_tensor_meta)
        if elements is None:
            return original(mesh, op_schema, strategy_info, output_tensor_meta)
        first: dict[Hashable, int] = {}
        for position, element in enumerate(elements):
            first.setdefault(element, position)
        chosen = list(first.values())
        number = {element: i for i, element in enumerate(first)}

        def distinct(value: Any) -> Any:
            return TupleStrategy([value.children[i] for i in chosen]) if isinstance(value, TupleStrategy) else value

        schema = OpSchema(
            op_schema.op, args_schema=tuple(map(distinct, op_schema.args_schema)), kwargs_schema=op_schema.kwargs_schema
        )
        metas = None if output_tensor_meta is None else [output_tensor_meta[i] for i in chosen]
        strategy_of = original(mesh, schema, strategy_info, metas)

        def strategy(op: Any, args_schema: Any, kwargs_schema: Any) -> Any:
            found = strategy_of(op, schema.args_meta, schema.kwargs_meta)
            return TupleStrategy([found.children[number[element]] for element in elements])

        return strategy

    sharding_prop._expand_single_dim_strategy_to_mesh = expand


def elements_of_lists(op_schema: Any, tuple_strategy: Any, output_tensor_meta: Any) -> list[Hashable] | None:
    """What decides about each element of a foreach operator; None for operators that are none, or are unusual."""
    if not op_schema.op.name().startswith(("aten::_foreach_", "aten::_fused_")):
        return None
    if any(isinstance(value, tuple_strategy) for value in op_schema.kwargs_schema.values()):
        return None
    lists = [value.children for value in op_schema.args_schema if isinstance(value, tuple_strategy)]
    lengths = {len(children) for children in lists}
    if len(lengths) != 1 or (output_tensor_meta is not None and len(output_tensor_meta) not in lengths):
        return None
    try:
        columns = [[tuple(spec.output_specs for spec in child.strategies) for child in children] for children in lists]
        if output_tensor_meta is not None:
            columns.append(list(output_tensor_meta))
        rows: list[Hashable] = list(zip(*columns, strict=True))
        set(map(hash, rows))
    except (AttributeError, TypeError):
        return None
    return rows


def _random_regions(recorder: Recorder) -> None:
    """Around random operators DTensor computes the generator's offset, in tensors on the CPU. 10 %, all of it for nothing.

    The simulated generator has no offset. Before the recorded step only what is allocated on the device is kept.
    """
    from torch.distributed.tensor import _random

    tracker = getattr(_random, "OffsetBasedRNGTracker", None)
    original = getattr(tracker, "_distribute_region", None)
    if original is None or not hasattr(tracker, "_get_device_state"):
        return

    @contextlib.contextmanager
    def region(self: Any, spec: Any, generator: Any = None) -> Iterator[None]:
        if recorder.log.recording or generator is not None:
            with original(self, spec, generator):
                yield
            return
        self._get_device_state()
        yield

    tracker._distribute_region = region  # type: ignore[union-attr]
