"""``autosac run``: a training script as it is, and what its step takes."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from autosac.cli.launchers import refusal
from autosac.cli.progress import progress_line
from autosac.cli.simulated import check_pictures, simulation_document, with_models, write_pictures
from autosac.errors import MicrobatchError, UsageError
from autosac.files.writing import check_outputs
from autosac.planning.closed_loop import Goal, Planned
from autosac.quantities import parse_budget
from autosac.report import summaries as reports
from autosac.report.idle_tables import idle_table
from autosac.report.time_tables import time_document, time_tables
from autosac.scripts.alike import planned_ranks
from autosac.scripts.captures import ScriptCaptures, plan_ranks
from autosac.scripts.ranks import RanksResult, ranks_of, running_ranks
from autosac.scripts.request import ScriptRequest
from autosac.scripts.target import script_target
from autosac.scripts.template import Template
from autosac.simulation import Simulation, Target

_TWO_LINES = """    import autosac
    model = autosac.apply(model, "{path}")"""
_RECOMPUTES = "the script recomputes activations by itself, also under a plan: without that a plan has more to decide"
_ALLOCATOR_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")


def script(arguments: argparse.Namespace) -> None:
    """Run it."""
    request = _request(arguments)
    check_pictures(arguments, () if request.is_module else (Path(request.script),))
    check_outputs((("-o", arguments.output),))
    if arguments.output is not None and arguments.plan is None:
        raise UsageError("-o is the file for a plan: give --plan and a budget, too")
    target = with_models(script_target(request), arguments)
    goal = None
    if arguments.plan is not None:
        goal = Goal(budget_bytes=parse_budget(arguments.plan, target.hardware.usable_bytes))
        request = replace(request, unlimited=True)
    try:
        _run(arguments, request, target, goal)
    except MicrobatchError as e:
        print(f"autosac: {e}: the script runs again, with every microbatch", file=sys.stderr)
        _run(arguments, replace(request, every_microbatch=True), target, goal)


def _run(arguments: argparse.Namespace, request: ScriptRequest, target: Target, goal: Goal | None) -> None:
    with running_ranks(request) as (result, folder):
        ranks = ranks_of(result.traces, target)
        simulation = max(ranks, key=lambda rank: rank.peak_active_bytes)
        write_pictures(arguments, simulation, None)
        if not arguments.json:
            _show(arguments, ranks, simulation, result)
        planned = None
        if goal is not None:
            outcome = result.outcome
            shared = replace(request, shared=str(folder), steps=max(1, outcome.kept), model=outcome.model)
            planned_for = [ranks[position] for position in planned_ranks(result.traces)]
            template = Template(compiles=any(rank.trace.info.compiled for rank in planned_for))
            with contextlib.closing(template):
                captures = [
                    ScriptCaptures(replace(shared, rank=rank.trace.info.rank), target, template, rank)
                    for rank in planned_for
                ]
                planned = _planned(arguments, goal, captures)
    if arguments.json:
        print(json.dumps(_document(arguments, ranks, simulation, result, planned), indent=1))
    elif planned is not None:
        _show_plan(planned, arguments.output)


def _show(
    arguments: argparse.Namespace, ranks: Sequence[Simulation], simulation: Simulation, result: RanksResult
) -> None:
    out = reports.console()
    outcome = result.outcome
    what = f"step {outcome.kept} of the {outcome.steps} that the script ran"
    if len(ranks) > 1:
        what += f": rank {simulation.trace.info.rank}"
    out.print(reports.simulation_summary(simulation, what))
    if len(ranks) > 1:
        out.print(reports.ranks_table(ranks))
    for note in _notes(arguments, simulation, result):
        out.print(f"- {note}", soft_wrap=True, markup=False)
    if arguments.time:
        out.print(time_tables(simulation))
    if arguments.memory:
        out.print(reports.memory_tables(simulation))
        out.print(idle_table(simulation.idle))


def _notes(arguments: argparse.Namespace, simulation: Simulation, result: RanksResult) -> tuple[str, ...]:
    """What was assumed, and what limits a plan."""
    notes = result.outcome.notes
    if arguments.plan is not None and simulation.recompute_ms:
        notes = (*notes, _RECOMPUTES)
    world_size = simulation.trace.info.world_size
    if world_size == 1:
        return notes
    numbers = ", ".join(map(str, result.ran))
    rest = "" if len(result.ran) == world_size else "; each of the others is assumed to be like one of them"
    notes = (*notes, f"of {world_size} ranks, {numbers} ran{rest}")
    if result.outcome.printed or len(result.ran) == 1:
        return notes
    return (
        *notes,
        f"rank {result.ran[0]} prints nothing: --rank {result.ran[-1]} shows the output of rank {result.ran[-1]}",
    )


def _planned(arguments: argparse.Namespace, goal: Goal, captures: Sequence[ScriptCaptures]) -> Planned:
    with progress_line(enabled=not arguments.quiet and not arguments.debug) as progress:
        planned = plan_ranks(captures, goal, progress)
    if arguments.output is not None:
        planned.plan.save(arguments.output)
    return planned


def _show_plan(planned: Planned, path: Path | None) -> None:
    out = reports.console()
    out.print(reports.plan_summary(planned.plan, planned.notes))
    if planned.plan.units or planned.plan.settings.optimizer_slice_bytes:
        said = f"plan written to {path}" if path is not None else "-o PLAN.json writes the plan to a file"
        what_wraps = "DDP, FSDP, parallelize_module, PipelineStage and torch.compile"
        out.print(f"{said}. To apply it, before {what_wraps}:", soft_wrap=True, markup=False)
        out.print(_TWO_LINES.format(path=path or "PLAN.json"), soft_wrap=True, markup=False, highlight=False)


def _document(
    arguments: argparse.Namespace,
    ranks: Sequence[Simulation],
    simulation: Simulation,
    result: RanksResult,
    planned: Planned | None,
) -> dict[str, Any]:
    document = simulation_document(simulation)
    outcome = result.outcome
    document["script"] = {
        "steps": outcome.steps,
        "kept": outcome.kept,
        "notes": _notes(arguments, simulation, result),
        "ran": result.ran,
    }
    document["ranks"] = [
        {
            "rank": rank.trace.info.rank,
            "step_ms": rank.step_ms,
            "peak_active_bytes": rank.peak_active_bytes,
            "peak_reserved_bytes": rank.peak_reserved_bytes,
        }
        for rank in ranks
    ]
    if arguments.time:
        document["time"] = time_document(simulation)
    if planned is not None:
        document["plan"] = json.loads(planned.plan.to_bytes())
    return document


def _request(arguments: argparse.Namespace) -> ScriptRequest:
    """What is asked for. UsageError if there is no script, or more than one."""
    first = [arguments.script] if arguments.module and arguments.script else []  # of a module, the first argument
    launched = [*first, *arguments.overrides]
    refused = refusal(arguments.module or arguments.script or "", launched)
    if refused:
        raise UsageError(refused)
    if (arguments.script is None) == (arguments.module is None):
        raise UsageError("give the path of a script, or -m and the name of a module")
    if arguments.script is not None and not Path(arguments.script).is_file():
        raise UsageError(f"{arguments.script}: there is no such file")
    if not arguments.patience > 0:
        raise UsageError(f"--patience {arguments.patience:g}: expected seconds, more than 0")
    allocator = arguments.alloc_conf
    if allocator is None:
        allocator = next((os.environ[name] for name in _ALLOCATOR_VARIABLES if os.environ.get(name)), "")
    return ScriptRequest(
        script=arguments.script if arguments.script is not None else arguments.module,
        is_module=arguments.module is not None,
        arguments=arguments.overrides,
        gpu=arguments.gpu,
        cluster=arguments.cluster,
        allocator=allocator,
        nproc=arguments.nproc if arguments.nproc is not None or arguments.nodes == 1 else 1,
        nodes=arguments.nodes,
        rank=arguments.rank[0] if arguments.rank else 0,
        only=tuple(arguments.rank or ()),
        steps=arguments.steps if arguments.steps is not None else 0 if arguments.fast_forward else 3,
        period=arguments.optimizer_steps,
        marker=arguments.step_marker or "",
        fast_forward=arguments.fast_forward,
        every_microbatch=arguments.every_microbatch,
        moe_load=arguments.moe_load,
        synthetic=arguments.synthetic_data,
        checkpoints=arguments.checkpoints,
        stand_ins=tuple(arguments.stand_in),
        patience_s=arguments.patience,
        unlimited=arguments.unlimited,
        quiet=arguments.json,
    )
