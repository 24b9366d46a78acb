"""``autosac run``: a training script as it is, and what its step takes."""

from __future__ import annotations

import argparse
import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

from autosac.cli.progress import progress_line
from autosac.cli.simulated import check_pictures, simulation_document, with_models, write_pictures
from autosac.errors import UsageError
from autosac.files.writing import check_outputs
from autosac.planning.closed_loop import Goal, Planned, make_plan
from autosac.quantities import parse_budget
from autosac.report import summaries as reports
from autosac.report.idle_tables import idle_table
from autosac.report.time_tables import time_document, time_tables
from autosac.scripts.captures import ScriptCaptures
from autosac.scripts.launch import run_script
from autosac.scripts.request import ScriptOutcome, ScriptRequest
from autosac.scripts.target import script_target
from autosac.simulation import Simulation, simulation_of

_TWO_LINES = """    import autosac
    model = autosac.apply(model, "{path}")"""
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
    result = run_script(request)
    simulation = simulation_of(result.trace, target)
    write_pictures(arguments, simulation, None)
    if not arguments.json:
        _show(arguments, simulation, result.outcome)
    planned = _planned(arguments, goal, ScriptCaptures(request, target)) if goal is not None else None
    if arguments.json:
        print(json.dumps(_document(arguments, simulation, result.outcome, planned), indent=1))
    elif planned is not None:
        _show_plan(planned, arguments.output)


def _show(arguments: argparse.Namespace, simulation: Simulation, outcome: ScriptOutcome) -> None:
    out = reports.console()
    what = f"step {outcome.kept} of the script, which ran {outcome.steps}"
    out.print(reports.simulation_summary(simulation, what))
    for note in outcome.notes:
        out.print(f"- {note}", soft_wrap=True, markup=False)
    if arguments.time:
        out.print(time_tables(simulation))
    if arguments.memory:
        out.print(reports.memory_tables(simulation))
        out.print(idle_table(simulation.idle))


def _planned(arguments: argparse.Namespace, goal: Goal, captures: ScriptCaptures) -> Planned:
    with progress_line(enabled=not arguments.quiet and not arguments.debug) as progress:
        planned = make_plan(captures, goal, progress)
    if arguments.output is not None:
        planned.plan.save(arguments.output)
    return planned


def _show_plan(planned: Planned, path: Path | None) -> None:
    out = reports.console()
    out.print(reports.plan_summary(planned.plan, planned.notes))
    if planned.plan.units:
        said = f"plan written to {path}" if path is not None else "-o PLAN.json writes the plan to a file"
        out.print(f"{said}. To apply it, before DDP, FSDP and torch.compile:", soft_wrap=True, markup=False)
        out.print(_TWO_LINES.format(path=path or "PLAN.json"), soft_wrap=True, markup=False, highlight=False)


def _document(
    arguments: argparse.Namespace, simulation: Simulation, outcome: ScriptOutcome, planned: Planned | None
) -> dict[str, Any]:
    document = simulation_document(simulation)
    document["script"] = {"steps": outcome.steps, "kept": outcome.kept, "notes": outcome.notes}
    if arguments.time:
        document["time"] = time_document(simulation)
    if planned is not None:
        document["plan"] = json.loads(planned.plan.to_bytes())
    return document


def _request(arguments: argparse.Namespace) -> ScriptRequest:
    """What is asked for. UsageError if there is no script, or more than one."""
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
        rank=arguments.rank,
        steps=arguments.steps,
        period=arguments.optimizer_steps,
        patience_s=arguments.patience,
        unlimited=arguments.unlimited,
        quiet=arguments.json,
    )
