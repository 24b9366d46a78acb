"""A stored step with its exact timeline, breakdown and critical path (`golden.json`): a change of the simulator shows here.

``AUTOSAC_UPDATE_GOLDEN=1 pytest tests/runtime_sim/test_golden.py`` writes the results anew; look at what changed before
committing. The numbers are multiples of 1/16 ms, so the comparison is exact.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from autosac.runtime_sim import INSTANT_HOST, ConstantOverlap, Timeline
from autosac.trace import Phase

GOLDEN = Path(__file__).with_name("golden.json")
RESULTS = ("start", "end", "moves")  # what the simulator says of an event: begin, end, and from when on bytes move
CALLS = {"record": "record", "wait": "wait", "wait_stream": "wait_stream", "wait_work": "wait_work"}


def add(step: Any, row: dict[str, Any]) -> None:
    """Append one row of the file to a rank's trace."""
    given = {key: value for key, value in row.items() if key not in RESULTS}
    if "phase" in given:
        given["phase"] = Phase[given["phase"]]
    if "op" in given:
        step.op(given.pop("ms"), kind=given.pop("op"), **given)
    elif "collective" in given:
        step.collective(given.pop("ms"), kind=given.pop("collective"), **given)
    elif "sync" in given:
        step.sync(reason=given.pop("sync"), **given)
    else:
        name = next(name for name in CALLS if name in given)
        getattr(step, CALLS[name])(given.pop(name), **given)


def with_results(row: dict[str, Any], timeline: Timeline, rank: int, index: int) -> dict[str, Any]:
    """The row with what became of it."""
    times = timeline.ranks[rank]
    found = dict.fromkeys(RESULTS)
    for name, column in zip(RESULTS, (times.start_ms, times.end_ms, times.transfer_ms), strict=True):
        found[name] = float(column[index])
    if "sync" in row:  # on the host: from when it waits, and when it goes on
        found |= {"start": float(times.host_start_ms[index]), "end": float(times.host_end_ms[index])}
    plain = {key: value for key, value in row.items() if key not in RESULTS}
    return plain | {name: value for name, value in found.items() if value == value}


def simulated(document: dict[str, Any], job: Callable[..., Any], run: Callable[..., Timeline]) -> dict[str, Any]:
    """The document with the results of a simulation in place of those that it has."""
    steps = []
    for rank in document["ranks"]:
        step = job(rank=rank["rank"])
        for row in rank["events"]:
            add(step, row)
        steps.append(step)
    settings = {"host": replace(INSTANT_HOST, **document["host_us"]), "overlap": ConstantOverlap(**document["overlap"])}
    timeline = run(*steps, **settings)
    ranks = [
        {
            "rank": rank["rank"],
            "events": [with_results(row, timeline, i, index) for index, row in enumerate(rank["events"])],
            "breakdown": asdict(timeline.breakdown(i)),
        }
        for i, rank in enumerate(document["ranks"])
    ]
    return document | {
        "ranks": ranks,
        "step_ms": timeline.makespan_ms,
        "critical_path": [list(segment) for segment in timeline.critical_path()],
        "two_steps_end_ms": list(run(*steps, **settings, steps=2).step_end_ms),
    }


def as_text(value: Any, indent: str = "") -> str:
    """JSON in which everything flat (an event, a module, a segment) takes one line."""
    if not isinstance(value, dict | list) or not any(isinstance(part, dict | list) for part in flat(value)):
        return json.dumps(value)
    inner = indent + " "
    if isinstance(value, list):
        parts, brackets = [as_text(part, inner) for part in value], "[]"
    else:
        parts, brackets = [f"{json.dumps(key)}: {as_text(part, inner)}" for key, part in value.items()], "{}"
    return f"{brackets[0]}\n{inner}" + f",\n{inner}".join(parts) + f"\n{indent}{brackets[1]}"


def flat(value: dict[str, Any] | list[Any]) -> list[Any]:
    """What a dictionary or a list holds."""
    return list(value.values()) if isinstance(value, dict) else value


def test_golden_step(job, run) -> None:
    """Every event's begin and end, the breakdown by rank and module, the critical path, and the second step's end."""
    document = json.loads(GOLDEN.read_text(encoding="utf-8"))
    found = json.loads(json.dumps(simulated(document, job, run)))
    if os.environ.get("AUTOSAC_UPDATE_GOLDEN") == "1":
        GOLDEN.write_text(as_text(found) + "\n", encoding="utf-8")
        document = found
    assert found == document
