"""The routing of tokens to experts in a capture."""

from __future__ import annotations

from autosac.capture.moe_load import MoELoad, Routing
from autosac.capture.record.recorder import Recorder
from autosac.trace import Phase


def routing_of(load: MoELoad, rank: int, recorder: Recorder) -> Routing:
    """The routers of the rank that is recorded."""

    def locate() -> tuple[str, bool]:
        place = recorder.phases.locate()
        return recorder.phases.modules.names[place.module], place.phase is Phase.RECOMPUTE

    return Routing(load, rank, locate)
