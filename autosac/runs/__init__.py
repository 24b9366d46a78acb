"""What the first real steps of a job took, as a small file: written by the job, read by ``autosac calibrate --from-run``."""

from __future__ import annotations

from autosac.runs.record import MeasuredSteps, Predicted, RunMemory, RunRecord, UnitTimes

__all__ = ["MeasuredSteps", "Predicted", "RunMemory", "RunRecord", "UnitTimes"]
