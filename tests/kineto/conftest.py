"""Builds profiler traces by hand: host operators, launches and kernels with correlation ids."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

H100 = {
    "id": 0,
    "name": "NVIDIA H100 80GB HBM3",
    "totalGlobalMem": 85018279936,
    "computeMajor": 9,
    "computeMinor": 0,
    "numSms": 132,
}


class TraceFile:
    """Events in the form of Kineto; times in microseconds."""

    def __init__(self, *, rank: int = 0, world_size: int = 1) -> None:
        self.events: list[Any] = []
        self.header: dict[str, Any] = {"schemaVersion": 1, "deviceProperties": [H100], "record_shapes": 1}
        if world_size > 1:
            self.header["distributedInfo"] = {"backend": "nccl", "rank": rank, "world_size": world_size}
        self._correlation = 0

    def op(
        self,
        name: str,
        begin: float,
        us: float,
        tensors: Sequence[tuple[Sequence[int], str] | None] = (),
        *,
        thread: int = 1,
        category: str = "cpu_op",
        **args: Any,
    ) -> None:
        """A host operator with these (shape, type) inputs, None for what is no tensor."""
        dims = [list(t[0]) if t else [] for t in tensors]
        types = [t[1] if t else "Scalar" for t in tensors]
        noted = {"External id": len(self.events) + 1, "Input Dims": dims, "Input type": types} | args
        self.events.append(
            {"ph": "X", "cat": category, "name": name, "pid": 7, "tid": thread, "ts": begin, "dur": us, "args": noted}
        )

    def kernel(
        self,
        name: str,
        launched: float,
        begin: float,
        us: float,
        *,
        thread: int = 1,
        stream: int = 7,
        category: str = "kernel",
        launch: str = "cudaLaunchKernel",
        **args: Any,
    ) -> None:
        """A kernel and its launch (none if `launch` is empty)."""
        self._correlation += 1
        if launch:
            self.events.append(
                {
                    "ph": "X",
                    "cat": "cuda_runtime",
                    "name": launch,
                    "pid": 7,
                    "tid": thread,
                    "ts": launched,
                    "dur": 1.0,
                    "args": {"correlation": self._correlation},
                }
            )
        noted = {"correlation": self._correlation, "device": 0, "stream": stream} | args
        self.events.append(
            {"ph": "X", "cat": category, "name": name, "pid": 0, "tid": stream, "ts": begin, "dur": us, "args": noted}
        )

    def save(self, path: Path) -> Path:
        """Write the file, gzipped if its name says so."""
        text = json.dumps(self.header | {"traceEvents": self.events}).encode()
        path.write_bytes(gzip.compress(text, mtime=0) if path.suffix == ".gz" else text)
        return path


@pytest.fixture
def trace_file() -> Callable[..., TraceFile]:
    """Makes an empty trace."""
    return TraceFile
