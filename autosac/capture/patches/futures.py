"""Futures of collectives: what is called upon them runs on the device, on streams of their own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import torch

from autosac.capture.device import device as simulated

_Future: TypeAlias = "torch.futures.Future[Any]"


class Future(torch.futures.Future):  # type: ignore[type-arg]
    """The host never waits for it. `wait` makes the current stream wait for the device."""

    def __init__(self, value: Any, wait: Callable[[], Any]) -> None:
        super().__init__()
        self._wait = wait
        self.set_result(value)

    def wait(self) -> Any:
        """The value, for work on the current stream."""
        self._wait()
        return self.value()

    def then(self, callback: Callable[[_Future], Any]) -> Future:
        """The callback runs at once; its kernels run on a stream of the pool, after what this stands for."""
        stream = simulated.Stream()
        with stream:
            self._wait()
            value = callback(self)
        return Future(value, lambda: simulated.current_stream().wait_stream(stream))

    def add_done_callback(self, callback: Callable[[_Future], Any]) -> None:
        """As `then`, without a result."""
        self.then(callback)
