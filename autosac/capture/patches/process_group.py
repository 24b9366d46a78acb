"""A process group without peers, under a backend name of its own (PyTorch treats the name "fake" specially in places).

Scripts make their groups themselves, with ``nccl`` or ``gloo``: `serve_scripts` gives them such groups under these names.
"""

from __future__ import annotations

import functools
import io
import os
import pickle
from collections.abc import Iterator
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from autosac.capture.device.device import DEVICE_TYPE
from autosac.capture.device.exchanged import meet
from autosac.capture.record.collectives import connected_at_once, is_connected

if TYPE_CHECKING:
    from autosac.capture.patches.stores import ScriptStore, Shelf

BACKEND = "simccl"
_shared: list[ScriptStore] = []  # one at most: the store of ranks that run beside each other


def initialise(world_size: int, rank: int, ranks_per_node: int = 8) -> None:
    """Make this process rank `rank` of `world_size`, as torchrun would have, without any peer."""
    from torch.testing._internal.distributed import fake_pg

    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK="0",
        WORLD_SIZE=str(world_size),
        LOCAL_WORLD_SIZE=str(min(world_size, ranks_per_node)),
        NGPU=str(world_size),
        MASTER_ADDR="localhost",
        MASTER_PORT="29999",
    )
    _register(DEVICE_TYPE)
    dist.init_process_group(BACKEND, rank=rank, world_size=world_size, store=fake_pg.FakeStore())


def _register(device_type: str) -> None:
    from torch.testing._internal.distributed import fake_pg

    if BACKEND.upper() not in dist.Backend.__dict__:
        dist.Backend.register_backend(BACKEND, fake_pg._create_fake_pg, extended_api=True, devices=["cpu", device_type])


def serve_scripts() -> None:
    """`init_process_group` and `new_group` find no peers and need none, whatever backend they ask for, and say they have it.

    All ranks are taken to be alike: objects that they exchange are this rank's own.
    """
    if not dist.is_available():
        return
    c10d: Any = dist.distributed_c10d
    _register("cuda")
    make = c10d._new_process_group_helper

    @functools.wraps(make)
    def new_group(size: int, rank: int, ranks: Any, backend: Any, *args: Any, **kwargs: Any) -> Any:
        if str(backend) == dist.Backend.FAKE:
            return make(size, rank, ranks, backend, *args, **kwargs)
        kwargs.pop("backend_options", None)
        at_once = kwargs.pop("device_id", None) is not None or _is_connected_at_once()
        made = make(size, rank, ranks, dist.Backend(BACKEND), *args, **kwargs)
        if made[0] in c10d._world.pg_map:
            c10d._world.pg_map[made[0]] = (backend, c10d._world.pg_map[made[0]][1])
            c10d._world.pg_backend_config[made[0]] = str(c10d.BackendConfig(backend))
            if at_once and str(backend) != dist.Backend.GLOO:
                connected_at_once(made[0].group_name)
        return made

    c10d._object_to_tensor = _object_to_tensor
    c10d._new_process_group_helper = new_group
    c10d.rendezvous = _rendezvous
    c10d.default_pg_nccl_timeout = timedelta(minutes=10)
    modules: tuple[Any, ...] = (c10d, dist)
    for module in modules:
        module.is_nccl_available = lambda: True
        module.is_gloo_available = lambda: True
        for function in (all_gather_object, gather_object, scatter_object_list, monitored_barrier, split_group):
            setattr(module, function.__name__, function)
    c10d.ProcessGroup.monitored_barrier = monitored_barrier


def _is_connected_at_once() -> bool:
    """Groups are made from the communicator of all ranks, if there is one already (`init_process_group` with a device)."""
    return dist.is_initialized() and is_connected(dist.distributed_c10d._get_default_group().group_name)


def _object_to_tensor(
    obj: Any, device: Any, group: Any, weights_only: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """A pickled object and its size. As torch's, which makes the tensor of a storage: fake ones cannot be made so.

    `weights_only`, from torch 2.14 on: the receiver reads it with `torch.load`.
    """
    file = io.BytesIO()
    if weights_only:
        torch.save(obj, file)
    else:
        pickle.dump(obj, file)
    data = torch.tensor(list(file.getvalue()), dtype=torch.uint8)
    return data.to(device), torch.tensor([data.numel()], dtype=torch.long).to(device)


def _rendezvous(url: str, rank: int = -1, world_size: int = -1, **_: Any) -> Iterator[tuple[Any, int, int]]:
    """The store that ranks share. As torch's, KeyError's kin if neither arguments nor the environment say who this rank is."""
    for name, given in (("RANK", rank), ("WORLD_SIZE", world_size)):
        if given < 0 and name not in os.environ:
            raise ValueError(
                f"Error initializing torch.distributed using env:// rendezvous: environment variable {name} expected, but "
                "not set (autosac run sets it with --nproc)"
            )
    yield (
        _shared[0] if _shared else _store_of_one(),
        rank if rank >= 0 else int(os.environ["RANK"]),
        world_size if world_size >= 0 else int(os.environ["WORLD_SIZE"]),
    )


def _store_of_one() -> Any:
    distributed: Any = dist
    store = distributed.HashStore()
    store.set_timeout(timedelta(seconds=10))
    return store


def share_store(shelf: Shelf, rank: int, world_size: int) -> None:
    """Ranks of this script that run beside each other have their stores on this shelf."""
    from autosac.capture.patches import stores

    _shared[:] = [stores.share(shelf, rank, world_size)]


def all_gather_object(object_list: list[Any], obj: Any, group: Any = None, **_: Any) -> None:
    """Every rank has the same object."""
    object_list[:] = [obj] * len(object_list)


def gather_object(obj: Any, object_gather_list: list[Any] | None = None, *_: Any, **__: Any) -> None:
    """Every rank has the same object."""
    if object_gather_list is not None:
        object_gather_list[:] = [obj] * len(object_gather_list)


def scatter_object_list(
    scatter_object_output_list: list[Any],
    scatter_object_input_list: list[Any] | None = None,
    src: int | None = 0,
    group: Any = None,
    **_: Any,
) -> None:
    """The object for this rank, where the list is known."""
    if scatter_object_input_list:
        objects = scatter_object_input_list
        scatter_object_output_list[0] = objects[dist.get_rank(group) % len(objects)]


def split_group(
    parent_pg: Any = None,
    split_ranks: list[list[int]] | None = None,
    timeout: timedelta | None = None,
    pg_options: Any = None,
    group_desc: str | None = None,
    **_: Any,
) -> Any:
    """A new group of those ranks of the parent that this rank is split off with; None if it is with none of them."""
    if not split_ranks:
        raise ValueError("split_ranks cannot be None or empty")
    if not _is_connected_at_once():
        raise RuntimeError("No device associated with the default pg, not safe to split any process groups")
    members = dist.get_process_group_ranks(parent_pg)
    for ranks in split_ranks:
        chosen = sorted(members[rank] for rank in ranks)
        if dist.get_rank() in chosen:
            return dist.new_group(chosen, timeout, use_local_synchronization=True, group_desc=group_desc)
    return None


def monitored_barrier(group: Any = None, *_: Any, **__: Any) -> None:
    """The ranks that run meet."""
    meet(group if isinstance(group, dist.ProcessGroup) else dist.distributed_c10d._get_default_group())
