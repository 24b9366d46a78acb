"""Trace and prices -> time: hosts, streams, events, collectives, ranks and their overlap, executed to the
microsecond.

`simulate` executes one rank's trace, or those of several distinct ranks together, and returns a `Timeline`:
the step time, when every event ran, where the time goes (`Timeline.breakdown`), and what determines it
(`Timeline.critical_path`). `write_chrome_trace` makes a picture of it.
"""

from __future__ import annotations

from autosac.runtime_sim.breakdown import Breakdown, ModuleTimes
from autosac.runtime_sim.buffers import Buffers
from autosac.runtime_sim.chrome_trace import chrome_trace, write_chrome_trace
from autosac.runtime_sim.critical_path import PathSegment
from autosac.runtime_sim.host import INSTANT_HOST, HostModel
from autosac.runtime_sim.overlap import ConstantOverlap, NoInterference, OverlapModel
from autosac.runtime_sim.program import LinkUse
from autosac.runtime_sim.ranks import RankTimeline
from autosac.runtime_sim.serial import serial_costs
from autosac.runtime_sim.simulate import simulate
from autosac.runtime_sim.timeline import Throughput, Timeline

__all__ = [
    "INSTANT_HOST",
    "Breakdown",
    "Buffers",
    "ConstantOverlap",
    "HostModel",
    "LinkUse",
    "ModuleTimes",
    "NoInterference",
    "OverlapModel",
    "PathSegment",
    "RankTimeline",
    "Throughput",
    "Timeline",
    "chrome_trace",
    "serial_costs",
    "simulate",
    "write_chrome_trace",
]
