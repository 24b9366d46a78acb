"""The replayed allocator against the real one, where there is a CUDA device: the same random sequence, the same counters."""

from __future__ import annotations

import random
from typing import Any

import pytest

from autosac.memory_sim import AllocatorConfig
from autosac.memory_sim.allocator import CachingAllocator

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

MIB = 2**20


def sequence(seed: int, length: int = 400) -> list[tuple[str, int]]:
    """Allocations ("new", bytes) and frees ("free", index of an allocation), mixed sizes of all pools."""
    source = random.Random(seed)
    alive: list[int] = []
    actions: list[tuple[str, int]] = []
    made = 0
    for _ in range(length):
        if alive and source.random() < 0.45:
            actions.append(("free", alive.pop(source.randrange(len(alive)))))
        else:
            limit = source.choice((4096, MIB, 8 * MIB, 40 * MIB))
            actions.append(("new", source.randrange(1, limit)))
            alive.append(made)
            made += 1
    return actions


@pytest.mark.parametrize("seed", range(8))
def test_reserved_and_active_bytes_are_those_of_the_device(seed: int) -> None:
    """After every action, reserved and active bytes of the simulated allocator equal torch.cuda's statistics."""
    torch.cuda.empty_cache()
    torch.cuda.synchronize()
    if torch.cuda.memory_reserved():
        pytest.fail("the device has to be unused when the test begins")
    simulated = CachingAllocator(AllocatorConfig(), None, 0)
    real: dict[int, Any] = {}
    blocks: dict[int, Any] = {}
    made = 0
    for action, value in sequence(seed):
        if action == "new":
            real[made] = torch.empty(value, dtype=torch.uint8, device="cuda")
            blocks[made] = simulated.malloc(value)
            made += 1
        else:
            del real[value]
            simulated.free(blocks.pop(value))
        statistics = torch.cuda.memory_stats()
        assert simulated.reserved_bytes == statistics["reserved_bytes.all.current"]
        assert simulated.active_bytes == statistics["active_bytes.all.current"]
