"""What NCCL's buffers hold of messages from one rank to another that nobody has received yet.

NCCL splits a message over channels, and the part of a channel into chunks. Each channel of two ranks has eight slots for
chunks, and a send is over when its last chunk is in a slot. From NCCL's source (2.30: `computeBuffSizes` in ``init.cc``,
`scheduleP2pTasksToPlan` and `addP2pToPlan` in ``enqueue.cc``, `ncclTopoGetNchannels` in ``graph/paths.cc``)::

    chunk              512 KiB over NVLink, 128 KiB over PCIe or between nodes; at most an eighth of NCCL_BUFFSIZE
    channels of a pair two for each link of NVLink; two over PCIe; one for each 14 GB/s of a GPU's network
    channels used      halved until each rank of the communicator could have as many, and fewer for small messages

The numbers of all channels of a communicator are those that NCCL logs on such machines.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

SLOTS = 8
_BUFFER_BYTES = 4 * 2**20
_PCIE_GBPS = 64.0  # of 16 lanes of the fifth generation: what is faster is NVLink
_LINK_GBPS = 25.0
_CHANNEL_GBPS = 14.0  # of a network


class _Path(NamedTuple):
    chunk_bytes: int
    channels: int  # of a communicator
    channels_of_pair: int
    least_part: float  # of a channel, in chunks
    most_part: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Buffers:
    """`buffer_bytes`: NCCL_BUFFSIZE. Bandwidths from one GPU: `pair_gbps` to another of its node, `network_gbps` to others."""

    buffer_bytes: int = _BUFFER_BYTES
    pair_gbps: float = 450.0
    network_gbps: float = 50.0

    def slots(self, nbytes: int, ranks: int, *, inter_node: bool) -> int:
        """How many slots of each channel a message takes, in a communicator of so many ranks."""
        path = self._path(inter_node)
        chunk = min(path.chunk_bytes, max(self.buffer_bytes // SLOTS, 1))
        channels = path.channels_of_pair
        while channels * ranks > path.channels and channels > 1:
            channels //= 2
        channels = min(channels, max(1, _ceil(nbytes, path.least_part * chunk)))
        while nbytes > channels * path.most_part * chunk and channels <= path.channels_of_pair // 2:
            channels *= 2
        return max(1, _ceil(nbytes, channels * chunk))

    def most_bytes(self, ranks: int, *, inter_node: bool) -> int:
        """The largest message that fits, to 1 KiB."""
        low, high = 0, 2**30
        while high - low > 2**10:
            middle = (low + high) // 2
            low, high = (middle, high) if self.slots(middle, ranks, inter_node=inter_node) <= SLOTS else (low, middle)
        return high

    def _path(self, inter_node: bool) -> _Path:
        if inter_node:
            return _Path(2**17, 16, _power_of_two(max(2, _ceil(self.network_gbps, _CHANNEL_GBPS))), 1 / 2, 1)
        if self.pair_gbps <= _PCIE_GBPS:
            return _Path(2**17, 2, 2, 1 / 8, 32)
        links = max(1, int(self.pair_gbps / _LINK_GBPS))
        return _Path(2**19, 32, min(32, _power_of_two(2 * links)), 1 / 8, 32)


def _ceil(whole: float, part: float) -> int:
    return int(-(-whole // part))


def _power_of_two(count: int) -> int:
    """The next one."""
    return 1 << (count - 1).bit_length()
