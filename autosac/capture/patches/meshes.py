"""Device meshes of thousands of ranks, of which one is captured: nothing is made for each of the others.

Patches of `torch.distributed.device_mesh`; each steps aside where PyTorch is not as expected.

- **Groups.** A mesh makes a process group for every row of every dimension, also of ranks elsewhere: real communicators need
  all ranks to call. Here only the captured rank's own row is made (`_own_groups`). A rank has one row in each dimension, so
  that groups are numbered alike on all ranks: their names still tell which ones meet. Without: 28,416 groups for a
  five-dimensional world of 8,192.
- **Meshes.** Slices and concatenations of meshes list all ranks of their root, twice, and FSDP concatenates two of them for
  every parameter. Equal ones are made once (`_equal_meshes`), and lists of ranks compare by identity first (`_RankList`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist


class _RankList(tuple[int, ...]):
    """The ranks of a mesh, which meshes of one root share; tensors with different meshes compare them all the time."""

    __slots__ = ()

    def __eq__(self, other: object) -> bool:
        return self is other or tuple.__eq__(self, other)

    def __ne__(self, other: object) -> bool:
        return not self == other

    __hash__ = tuple.__hash__


def install(rank: int) -> None:
    """All of them, for a capture of this rank."""
    if not dist.is_available():
        return
    from torch.distributed import device_mesh

    _own_groups(device_mesh.DeviceMesh, rank)
    _equal_meshes(device_mesh.DeviceMesh)


def _own_groups(mesh_class: Any, rank: int) -> None:
    """`_init_one_process_group` loops over the rows that `remap_to_tensor` returns: let it be the rank's own only."""
    from torch.distributed import _mesh_layout

    layout_class: Any = getattr(_mesh_layout, "_MeshLayout", None)
    remap = getattr(layout_class, "remap_to_tensor", None)
    original = getattr(mesh_class, "_init_one_process_group", None)
    if remap is None or original is None:
        return
    making = [False]

    def own_row(self: Any, rank_map: torch.Tensor) -> torch.Tensor:
        rows: torch.Tensor = remap(self, rank_map)
        return rows[(rows == rank).any(dim=1)] if making[0] and rows.dim() == 2 else rows

    @functools.wraps(original)
    def init_one(*args: Any, **kwargs: Any) -> Any:
        making[0] = True
        try:
            return original(*args, **kwargs)
        finally:
            making[0] = False

    layout_class.remap_to_tensor = own_row
    mesh_class._init_one_process_group = staticmethod(init_one)


def _equal_meshes(mesh_class: Any) -> None:
    """The same slice of a mesh, and the same meshes concatenated, are the same mesh."""
    slice_of = getattr(mesh_class, "_create_sub_mesh", None)
    concatenate = getattr(mesh_class, "_concatenate", None)
    if slice_of is None or concatenate is None:
        return
    ranks: dict[tuple[int, ...], _RankList] = {}
    make = mesh_class.__init__

    @functools.wraps(make)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        make(self, *args, **kwargs)
        found = getattr(self, "_flatten_rank_map", None)
        if type(found) is tuple:
            self._flatten_rank_map = ranks.setdefault(found, _RankList(found))

    mesh_class.__init__ = init
    # Ids of meshes are keys: they are kept alive beside the result.
    slices: dict[Any, tuple[Any, Any]] = {}
    joined: dict[tuple[int, ...], tuple[list[Any], Any]] = {}

    @functools.wraps(slice_of)
    def create_sub_mesh(self: Any, layout: Any, names: tuple[str, ...]) -> Any:
        return _remembered(slices, (id(self), layout, names), self, lambda: slice_of(self, layout, names))

    @functools.wraps(concatenate)
    def concatenated(meshes: list[Any]) -> Any:
        return _remembered(joined, tuple(map(id, meshes)), meshes, lambda: concatenate(meshes))

    mesh_class._create_sub_mesh = create_sub_mesh
    mesh_class._concatenate = staticmethod(concatenated)


def _remembered(known: dict[Any, tuple[Any, Any]], key: Any, alive: Any, make: Callable[[], Any]) -> Any:
    if key not in known:
        known[key] = (alive, make())
    return known[key][1]
