"""Capture the steps of this folder anew: ``python tests/golden/capture.py`` (needed when the format of traces changes).

Three layers of Llama-3's debug model on 8 GPUs under FSDP: observed without checkpointing, under TorchTitan's selective
checkpointing, and recomputing all layers (`outer`) or all attentions and feed-forward networks (`inner`).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from autosac.capture.process.server import CaptureServer
from autosac.capture.request import TitanRequest
from autosac.files.temporary import temporary_folder
from autosac.planning.planner import Goal, Planner, plan_of
from autosac.simulation import Target, simulation_of
from autosac.trace import Trace

FOLDER = Path(__file__).parent
ARGUMENTS = "--model.name llama3 --model.flavor debugmodel --training.local_batch_size 8 --training.seq_len 2048"


def main() -> None:
    """Write the four traces."""
    with CaptureServer(use_cache=False) as server, temporary_folder() as folder:

        def captured(name: str, **how: Any) -> Trace:
            request = TitanRequest(config_file=None, overrides=tuple(ARGUMENTS.split()), world_size=8, layers=3, **how)
            trace = server.capture(request)
            trace.save(FOLDER / f"{name}.trace")
            return trace

        base = simulation_of(captured("observed", checkpointing="none", observe=True), Target.of("h100-sxm-80gb", 8))
        captured("selective", checkpointing="selective-op")
        goal = Goal(budget_bytes=1, budget_kind="active")
        units = Planner(base, goal).policies.units
        for name, depth in (("outer", 1), ("inner", 2)):
            chosen = tuple(unit.recompute_all() for unit in units if unit.name.count(".") == depth)
            path = folder / f"{name}.json"
            plan_of(base, goal, chosen).save(path)
            captured(name, plan_file=str(path))


if __name__ == "__main__":
    main()
