"""What NCCL's buffers hold of messages that nobody has received yet; worked out by hand from its source."""

from __future__ import annotations

import pytest

from autosac.runtime_sim import Buffers
from autosac.runtime_sim.buffers import SLOTS

MIB = 2**20


@pytest.mark.parametrize(
    ("buffers", "ranks", "inter_node", "most_mib"),
    [
        (Buffers(), 2, False, 64),  # 32 channels, half of them for each of two ranks, with eight chunks of 512 KiB
        (Buffers(), 8, False, 16),  # four channels
        (Buffers(buffer_bytes=32 * MIB), 2, False, 64),  # chunks are not larger than 512 KiB
        (Buffers(buffer_bytes=MIB), 2, False, 16),
        (Buffers(pair_gbps=100), 2, False, 32),  # four links: eight channels
        (Buffers(pair_gbps=25), 2, False, 1),  # PCIe: one channel with eight chunks of 128 KiB
        (Buffers(), 2, True, 4),  # four channels for 50 GB/s
        (Buffers(network_gbps=25), 2, True, 2),
    ],
)
def test_the_largest_message_that_fits(buffers: Buffers, ranks: int, inter_node: bool, most_mib: int) -> None:
    """It fills the eight slots of all channels that NCCL uses, and one byte more is too much."""
    assert buffers.slots(most_mib * MIB, ranks, inter_node=inter_node) == SLOTS
    assert buffers.slots(most_mib * MIB + 1, ranks, inter_node=inter_node) == SLOTS + 1
    assert buffers.most_bytes(ranks, inter_node=inter_node) == pytest.approx(most_mib * MIB, abs=1024)


def test_small_messages_take_one_slot_of_fewer_channels() -> None:
    """A channel carries at least 64 KiB over NVLink; even nothing takes a slot."""
    assert [Buffers().slots(nbytes, 2, inter_node=False) for nbytes in (0, 1, 64 * 2**10, 8 * MIB, 8 * MIB + 1)] == [
        1,
        1,
        1,
        1,
        2,
    ]
