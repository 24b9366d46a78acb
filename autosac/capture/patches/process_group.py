"""A process group without peers, under a backend name of its own (PyTorch treats the name "fake" specially in places)."""

from __future__ import annotations

import os

import torch.distributed as dist

from autosac.capture.device.device import DEVICE_TYPE

BACKEND = "simccl"


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
    if BACKEND.upper() not in dist.Backend.__dict__:
        dist.Backend.register_backend(BACKEND, fake_pg._create_fake_pg, extended_api=True, devices=["cpu", DEVICE_TYPE])
    dist.init_process_group(BACKEND, rank=rank, world_size=world_size, store=fake_pg.FakeStore())
