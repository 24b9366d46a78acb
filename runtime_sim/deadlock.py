"""Why an execution stopped before its end: names what waits, for what, and the operator that never comes."""

from __future__ import annotations

from collections.abc import Sequence

from autosac.runtime_sim.engine import Execution
from autosac.runtime_sim.program import Program, Transfer, describe
from autosac.trace import Trace


def explain_deadlock(traces: Sequence[Trace], program: Program, execution: Execution) -> str:
    """One paragraph: every rank's stuck communication kernels, or what its host waits for; empty if nothing is there yet."""
    stuck = [i for i, end in enumerate(execution.end) if end < 0 <= execution.start[i]]
    lines = []
    for item in stuck:
        for _, number in program.legs[item]:
            if execution.transfer_end[number] < 0:
                lines.append(_waiting(traces, program, execution, item, program.transfers[number]))
    lines += [line for rank in range(len(traces)) if (line := _host(traces, program, execution, rank))]
    return "; ".join(dict.fromkeys(lines))


def has_stuck_send(traces: Sequence[Trace], program: Program, execution: Execution) -> bool:
    """Whether a send waits for a recv that its rank issues."""
    for item, end in enumerate(execution.end):
        if end < 0 <= execution.start[item]:
            for event, number in program.legs[item]:
                sends = getattr(traces[program.rank[item]].events[event], "kind", "") == "send"
                if sends and execution.transfer_end[number] < 0 and not program.transfers[number].missing:
                    return True
    return False


def _waiting(traces: Sequence[Trace], program: Program, execution: Execution, item: int, transfer: Transfer) -> str:
    """Item is at a rendezvous where others are missing."""
    position = program.rank[item]
    stream = program.stream_names[position][program.stream[item]]
    who = f"rank {program.ranks[position]} waits on stream {stream!r} in {_event(traces, program, item)}"
    if transfer.missing:
        ranks = ", ".join(str(program.ranks[rank]) for rank in transfer.missing)
        return f"{who} for {transfer.label}, which rank {ranks} never issues"
    members = transfer.members if transfer.after_start < 0 else (*transfer.members, transfer.after_start)
    late = [member for member in members if execution.start[member] < 0]
    return f"{who} for " + " and ".join(_blocked(traces, program, execution, member) for member in late)


def _blocked(traces: Sequence[Trace], program: Program, execution: Execution, item: int) -> str:
    """A member that exists but is never reached, and the first thing it is behind."""
    position = program.rank[item]
    what = f"{_event(traces, program, item)} of rank {program.ranks[position]}"
    if any(point.item == item for point in program.points[position][execution.cursor[position] :]):
        return f"{what}, which the host never issues"
    behind = next(other for other in program.dependencies[item] if execution.end[other] < 0)
    stream = program.stream_names[position][program.stream[behind]]
    return f"{what}, which is behind {_event(traces, program, behind)} on stream {stream!r}"


def _host(traces: Sequence[Trace], program: Program, execution: Execution, rank: int) -> str:
    if not execution.host_waits[rank]:
        return ""
    point = program.points[rank][execution.cursor[rank]]
    item = min(execution.host_waits[rank])
    where = describe(traces[rank], point.event)
    return f"the host of rank {program.ranks[rank]} waits at {where} for {_event(traces, program, item)}"


def _event(traces: Sequence[Trace], program: Program, item: int) -> str:
    return describe(traces[program.rank[item]], program.event[item])
