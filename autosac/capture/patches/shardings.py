"""DTensor's sharding decisions, which one process can hand to another: a third of a capture of one layer under tensor
parallelism is spent on making them.

What DTensor decides for a call (`OutputSharding`) depends on the call's schema: the operator, shapes and placements of its
arguments, the other arguments, and the meshes. It is kept as a pickle in which a mesh is the number of its place in the
schema, and found by the schema's own pickle and what the meshes look like (`_appearance`): their shapes, names, which ranks
they join beside which, and where in them this rank stands; not which ranks these are, for these decide who talks to whom, but
not what is to be said. So that a decision serves other pipeline stages, too.

Decisions of operators that have no strategy of their own are left to DTensor, which notes more about them than it returns,
and those with anything in them that is not known as plain data (`_DATA`).
"""

from __future__ import annotations

import importlib
import io
import pickle
from collections.abc import Iterable
from types import BuiltinFunctionType, FunctionType
from typing import Any, TypeAlias

import torch
from torch._ops import OpOverload
from torch.distributed.device_mesh import DeviceMesh

from autosac.capture.device.recipes import PLAIN, operator_named, switches

Decision: TypeAlias = tuple[bytes, bytes]


class Decisions:
    """Sharding decisions by what they are made for: those that were received, and those found by this process since."""

    def __init__(self) -> None:
        self._known: dict[bytes, bytes] = {}
        self._found: list[Decision] = []

    def take(self) -> list[Decision]:
        """What has been found since the last time."""
        found, self._found = self._found, []
        return found

    def receive(self, decisions: Iterable[Decision]) -> None:
        """What another process has found."""
        self._known.update(decisions)

    def __len__(self) -> int:
        return len(self._known)

    def decide(self, propagator: Any, original: Any, schema: Any) -> Any:
        """What `original` decides for a call, by a decision that is known if there is one."""
        if not (schema.op in propagator.op_single_dim_strategy_funcs or schema.op in propagator.op_strategy_funcs):
            return original(schema)
        try:
            key, meshes = _frozen(schema, [])
            key += pickle.dumps((switches(), torch.get_default_dtype(), [_appearance(mesh) for mesh in meshes]))
            known = self._known.get(key)
            if known is not None:
                return _thawed(known, meshes)
        except _NOT_PLAIN:
            return original(schema)
        decision = original(schema)
        try:
            frozen, _ = _frozen(decision, meshes, closed=True)
            if _thawed(frozen, meshes) == decision:
                self._found.append((key, frozen))
        except _NOT_PLAIN:
            pass
        return decision


_NOT_PLAIN = (pickle.PicklingError, AttributeError, TypeError, KeyError)
decisions = Decisions()
"""Of this process: what it has found itself, and what it and its parents have received."""


def install() -> None:
    """Let DTensor ask for decisions that are known. Nothing where this torch's DTensor is not as expected."""
    tensor: Any = importlib.import_module("torch.distributed.tensor")
    propagator: Any = getattr(getattr(tensor.DTensor, "_op_dispatcher", None), "sharding_propagator", None)
    names = ("propagate_op_sharding", "propagate_op_sharding_non_cached", "op_strategy_funcs")
    if not all(hasattr(propagator, name) for name in (*names, "op_single_dim_strategy_funcs")):
        return
    original = propagator.propagate_op_sharding_non_cached

    def decide(schema: Any) -> Any:
        return decisions.decide(propagator, original, schema)

    propagator.propagate_op_sharding_non_cached = decide
    propagator.propagate_op_sharding = type(propagator.propagate_op_sharding)(decide)


_DATA = {
    "torch": ("Size",),
    "torch.distributed.tensor._dtensor_spec": ("DTensorSpec", "TensorMeta", "ShardOrderEntry"),
    "torch.distributed.tensor._op_schema": ("OpSchema", "OutputSharding", "RuntimeSchemaInfo"),
    "torch.distributed.tensor.placement_types": ("Partial", "Replicate", "Shard", "_StridedShard"),
}
"""What schemas and decisions consist of, by module. A `_MaskPartial` holds tensors on the way."""


# ---- schemas and decisions as bytes --------------------------------------------------------------------------------------


class _Pickler(pickle.Pickler):
    """Meshes by their places in `meshes`, to which it adds unless it is `closed`; operators by their names."""

    def __init__(self, file: io.BytesIO, meshes: list[Any], *, closed: bool) -> None:
        super().__init__(file, protocol=5)
        self._meshes, self._closed = meshes, closed

    def persistent_id(self, value: Any) -> Any:
        if isinstance(value, DeviceMesh):
            for place, mesh in enumerate(self._meshes):
                if mesh is value:
                    return place
            if self._closed:
                raise pickle.PicklingError("a mesh that is none of the call's")
            self._meshes.append(value)
            return len(self._meshes) - 1
        return value.name() if isinstance(value, OpOverload) else None

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, FunctionType | BuiltinFunctionType):
            return NotImplemented  # by its name: what makes a value of one of these kinds
        kind = value if isinstance(value, type) else type(value)
        if kind.__qualname__ not in _DATA.get(kind.__module__, ()) and kind not in PLAIN:
            raise pickle.PicklingError(f"{kind.__qualname__} may be more than data")
        if value is not kind and "_hash" in getattr(value, "__dict__", ()):
            return _bare, (kind,), {**vars(value), "_hash": None}
        return NotImplemented


def _bare(kind: type) -> Any:
    return object.__new__(kind)


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, meshes: list[Any]) -> None:
        super().__init__(file)
        self._meshes = meshes

    def persistent_load(self, pid: Any) -> Any:
        return operator_named(pid) if isinstance(pid, str) else self._meshes[pid]


def _frozen(value: Any, meshes: list[Any], *, closed: bool = False) -> tuple[bytes, list[Any]]:
    file = io.BytesIO()
    _Pickler(file, meshes, closed=closed).dump(value)
    return file.getvalue(), meshes


def _thawed(frozen: bytes, meshes: list[Any]) -> Any:
    return _Unpickler(io.BytesIO(frozen), meshes).load()


def _appearance(mesh: Any) -> tuple[Any, ...]:
    """See the module's docstring."""
    known = _appearances.get(id(mesh))
    if known is None:
        with torch._C._DisableTorchDispatch():
            ranks = mesh.mesh
            relative = (ranks - ranks.min()).flatten().tolist()
        coordinate = mesh.get_coordinate()
        known = _appearances[id(mesh)] = (
            mesh,  # alive, so that no other has its number
            (
                tuple(ranks.shape),
                tuple(relative),
                mesh.mesh_dim_names,
                mesh.device_type,
                None if coordinate is None else tuple(coordinate),
            ),
        )
    return known[1]


_appearances: dict[int, tuple[Any, tuple[Any, ...]]] = {}
