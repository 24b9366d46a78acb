"""The settings of PyTorch's CUDA caching allocator: ``PYTORCH_CUDA_ALLOC_CONF``
(``c10/core/AllocatorConfig.cpp``).

`AllocatorConfig.parse` accepts what PyTorch accepts. Settings that cannot change how much device memory is
used (pinned host memory, locks) are checked by name only. Sizes and rounding:

- `round_size`: up to 512 bytes; with divisions d > 1 for the size's power of two and size > 512 d, up to the
  next of d equal parts between two powers of two (``roundup_power2_next_division``);
- `segment_size`: what is asked of CUDA for a request: 2 MiB up to 1 MiB, 20 MiB below 10 MiB, else rounded up
  to 2 MiB (``get_allocation_size``).
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from autosac.errors import UsageError

MIB = 1 << 20
BLOCK_BYTES = 512
"""What every request is rounded up to a multiple of (``kMinBlockSize``)."""
SMALL_BYTES = MIB
"""The largest request that the pool of small blocks serves (``kSmallSize``)."""
SMALL_SEGMENT_BYTES = 2 * MIB
LARGE_SEGMENT_BYTES = 20 * MIB
MIN_LARGE_BYTES = 10 * MIB
"""Requests from here on get a segment of their own size (``kMinLargeAlloc``)."""
ROUND_LARGE_BYTES = 2 * MIB
INTERVALS = 16
"""Powers of two from 1 MiB to 64 GiB, for ``roundup_power2_divisions``."""

IGNORED = frozenset(
    {
        "release_lock_on_cudamalloc",
        "release_lock_on_hipmalloc",
        "pinned_use_cuda_host_register",
        "pinned_use_hip_host_register",
        "pinned_num_register_threads",
        "pinned_use_background_threads",
        "pinned_reserve_segment_size_mb",
        "pinned_free_catch_all",
        "pinned_max_round_threshold_mb",
        "pinned_max_cached_size_mb",
        "graph_capture_record_stream_reuse",
        "throw_on_cudamalloc_oom",
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class AllocatorConfig:
    """One configuration; the defaults are PyTorch's. `max_split_bytes` None: blocks of any size are split.

    `roundup_power2_divisions`: divisions (0: none) for requests from 1, 2, 4, ... MiB; the first also serves
    smaller ones.
    `memory_fraction`: the part of the device that the allocator may reserve; its garbage collection, if
    `garbage_collection_threshold` is above 0, begins at that fraction of it.
    """

    expandable_segments: bool = False
    max_split_bytes: int | None = None
    max_non_split_rounding_bytes: int = LARGE_SEGMENT_BYTES
    large_segment_bytes: int = LARGE_SEGMENT_BYTES
    garbage_collection_threshold: float = 0.0
    roundup_power2_divisions: tuple[int, ...] = (0,) * INTERVALS
    memory_fraction: float = 1.0

    @staticmethod
    def parse(text: str) -> AllocatorConfig:
        """What a ``PYTORCH_CUDA_ALLOC_CONF`` string sets. UsageError says what is wrong in it."""
        settings: dict[str, object] = {}
        for item in re.findall(r"(?:[^,\[]|\[[^\]]*(?:\]|$))+", "".join(text.split())):
            key, colon, value = item.partition(":")
            if key in IGNORED:
                continue
            if key == "backend":
                if value != "native":
                    raise _error(f"backend {value!r} is not modelled; only 'native' is")
                continue
            if key not in PARSERS:
                known = ", ".join(sorted([*PARSERS, "backend", *IGNORED]))
                raise _error(f"unknown option {key!r}; known are {known}")
            if not colon or not value:
                raise _error(f"{key} has no value; write {key}:<value>")
            field, parser = PARSERS[key]
            settings[field] = parser(key, value)
        config = AllocatorConfig(**settings)  # type: ignore[arg-type]
        for field, name in (
            ("max_split_bytes", "max_split_size_mb"),
            ("max_non_split_rounding_bytes", "max_non_split_rounding_mb"),
        ):
            if field in settings and getattr(config, field) < config.large_segment_bytes:
                raise _error(f"{name} must be at least {config.large_segment_bytes // MIB}")
        return config

    def round_size(self, nbytes: int) -> int:
        """What a request of so many bytes takes from a block."""
        if nbytes < BLOCK_BYTES:
            return BLOCK_BYTES
        interval = min(max(nbytes.bit_length() - 21, 0), INTERVALS - 1)
        divisions = self.roundup_power2_divisions[interval]
        if divisions > 1 and nbytes > BLOCK_BYTES * divisions:
            part = (1 << (nbytes.bit_length() - 1)) // divisions
            return -(-nbytes // part) * part
        return -(-nbytes // BLOCK_BYTES) * BLOCK_BYTES

    def segment_size(self, size: int) -> int:
        """What is asked of CUDA when no cached block serves a request of this rounded size."""
        if size <= SMALL_BYTES:
            return SMALL_SEGMENT_BYTES
        if size < MIN_LARGE_BYTES:
            return self.large_segment_bytes
        return -(-size // ROUND_LARGE_BYTES) * ROUND_LARGE_BYTES


def _error(message: str) -> UsageError:
    return UsageError(f"PYTORCH_CUDA_ALLOC_CONF: {message}")


def _boolean(key: str, value: str) -> bool:
    if value not in ("True", "False"):
        raise _error(f"{key} must be True or False, not {value!r}")
    return value == "True"


def _integer(key: str, value: str) -> int:
    if not re.fullmatch(r"[0-9]{1,9}", value):
        raise _error(f"{key} must be a whole number of at most nine digits, not {value!r}")
    return int(value)


def _mebibytes(key: str, value: str) -> int:
    return _integer(key, value) * MIB


def _large_segment(key: str, value: str) -> int:
    nbytes = _mebibytes(key, value)
    if nbytes <= MIN_LARGE_BYTES:
        raise _error(f"{key} must be above {MIN_LARGE_BYTES // MIB}")
    return nbytes


def _fraction(key: str, value: str) -> float:
    try:
        fraction = float(value)
    except ValueError:
        raise _error(f"{key} must be a number, not {value!r}") from None
    below_one = fraction < 1 if key == "garbage_collection_threshold" else fraction <= 1
    if not (fraction > 0 and below_one):
        raise _error(f"{key} must be between 0 and 1, not {value}")
    return fraction


def _divisions(key: str, value: str) -> tuple[int, ...]:
    """``8`` for all sizes, or ``[256:1,512:2,>:4]``: from 256 MiB, from 512 MiB, above."""
    if not value.startswith("["):
        return (_division(key, value, smallest=1),) * INTERVALS
    if not value.endswith("]"):
        raise _error(f"{key}: the list {value!r} is not closed by ']'")
    divisions = [0] * INTERVALS
    last = -1
    for entry in value[1:-1].split(","):
        boundary, colon, count = entry.partition(":")
        if not colon:
            raise _error(f"{key}: {entry!r} is not of the form <MiB>:<divisions>")
        parts = _division(key, count, smallest=0)
        if boundary == ">":
            first = max(last, 0) + 1
            divisions[first:] = [parts] * (INTERVALS - first)
            continue
        mebibytes = _integer(key, boundary)
        if mebibytes < 1 or mebibytes & (mebibytes - 1):
            raise _error(f"{key}: the boundary {boundary} is not a power of two")
        index = min(mebibytes.bit_length() - 1, INTERVALS - 1)
        if last < 0:
            divisions[:index] = [parts] * index
        divisions[index] = parts
        last = index
    return tuple(divisions)


def _division(key: str, value: str, smallest: int) -> int:
    count = _integer(key, value)
    if count < smallest or count & (count - 1):
        raise _error(f"{key}: {value} divisions is not a power of two")
    return count


PARSERS: dict[str, tuple[str, Callable[[str, str], object]]] = {
    "expandable_segments": ("expandable_segments", _boolean),
    "max_split_size_mb": ("max_split_bytes", _mebibytes),
    "max_non_split_rounding_mb": ("max_non_split_rounding_bytes", _mebibytes),
    "large_segment_size_mb": ("large_segment_bytes", _large_segment),
    "garbage_collection_threshold": ("garbage_collection_threshold", _fraction),
    "roundup_power2_divisions": ("roundup_power2_divisions", _divisions),
    "per_process_memory_fraction": ("memory_fraction", _fraction),
}
"""Option -> (field of AllocatorConfig, parser of (option, value))."""
