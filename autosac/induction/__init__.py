"""Induction over the number of layers: the trace of a step with many equal layers from three steps with few, exactly.

`capturing` starts the captures of a job that way and falls back to the whole job where its layers do not repeat;
`TraceFamily` is the induction itself.
"""

from autosac.induction.alignment import Refusal
from autosac.induction.captures import Capturing, capturing, early_info, joined
from autosac.induction.traces import TraceFamily, difference

__all__ = ["Capturing", "Refusal", "TraceFamily", "capturing", "difference", "early_info", "joined"]
