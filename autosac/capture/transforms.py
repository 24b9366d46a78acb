"""What is done to the model during a capture, at the place where TorchTitan applies its own checkpointing."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from autosac.capture.recorder import Recorder
from autosac.capture.request import TitanRequest


@contextlib.contextmanager
def transform_of(request: TitanRequest, recorder: Recorder) -> Iterator[None]:
    yield
