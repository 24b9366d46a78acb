"""``autosac run``: a training script as it is, and what its step takes."""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import Any

from autosac.cli.simulated import check_pictures, simulation_document, with_models, write_pictures
from autosac.errors import UsageError
from autosac.files.writing import check_outputs
from autosac.report import summaries as reports
from autosac.report.time_tables import time_document, time_tables
from autosac.scripts.launch import run_script
from autosac.scripts.request import ScriptOutcome, ScriptRequest
from autosac.scripts.target import script_target
from autosac.simulation import simulation_of

_ALLOCATOR_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")


def script(arguments: argparse.Namespace) -> None:
    """Run it."""
    request = _request(arguments)
    check_pictures(arguments, () if request.is_module else (Path(request.script),))
    check_outputs((("-o", arguments.output),))
    target = with_models(script_target(request), arguments)
    result = run_script(request)
    simulation = simulation_of(result.trace, target)
    write_pictures(arguments, simulation, None)
    if arguments.json:
        document: dict[str, Any] = simulation_document(simulation)
        document["script"] = {"steps": result.outcome.steps, "kept": result.outcome.kept, "notes": result.outcome.notes}
        if arguments.time:
            document["time"] = time_document(simulation)
        print(json.dumps(document, indent=1))
        return
    out = reports.console()
    out.print(reports.simulation_summary(simulation, _what(result.outcome)))
    for note in result.outcome.notes:
        out.print(f"- {note}", soft_wrap=True)
    if arguments.time:
        out.print(time_tables(simulation))
    if arguments.memory:
        out.print(reports.memory_tables(simulation))


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


def _what(outcome: ScriptOutcome) -> str:
    return f"step {outcome.kept} of the script, which ran {outcome.steps}"
