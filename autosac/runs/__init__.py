"""What the first real steps of a job took, as a small file: written by the job, read by ``autosac calibrate --from-run``."""

from __future__ import annotations

from autosac.runs.record import Predicted, RunMemory, RunRecord, Steps, UnitTimes

__all__ = ["Predicted", "RunMemory", "RunRecord", "Steps", "UnitTimes"]
