"""What the first real steps of a job took, as a small file: written by the job, read by ``autosac calibrate --from-run``."""

from __future__ import annotations

from autosac.runs.record import Memory, Predicted, RunRecord, Steps, UnitTimes

__all__ = ["Memory", "Predicted", "RunRecord", "Steps", "UnitTimes"]
