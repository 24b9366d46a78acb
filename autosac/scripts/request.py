"""What to run, and what came of it: the two documents between the command and the process of the script."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from autosac.errors import UsageError

_MOST_STEPS = 10**9
TRACE, OUTCOME = "trace", "outcome.json"  # files in a rank's folder


@dataclass(frozen=True, slots=True, kw_only=True)
class ScriptRequest:
    """One rank of a script.

    `script` is a path, or with `is_module` a module's name, as after ``python -m``. `nproc` ranks on each of `nodes` nodes
    get the environment of torchrun; None: the script is started by itself. `steps`: how many the script runs (0: all that
    it wants). `period`: calls of `Optimizer.step` in a step; `marker`: the function whose calls end steps in their place.
    `fast_forward`: steps after the one that is kept are not computed. `every_microbatch`: none is copied from
    others. `moe_load`: how tokens are spread over experts.
    `synthetic`: columns of made-up data sets, where one cannot be loaded. `stand_ins`: names or files of them.
    `checkpoints`: the script writes its own. `patience_s`: how long to wait for a step. `plan_file` applies a plan to the
    model, `optimizer_slice_bytes` decides for optimizers where there is none, `observe` records the regions of all modules
    that could be checkpointed; `model` says which one that is (`ScriptOutcome.model`). `unlimited`: the device never runs
    out of memory. `quiet`: what the script prints on standard output is dropped. `shared`: the folder of the ranks' messages,
    where other ranks may run; `shown` is the rank that does so always, `only` are those that may run, if not all
    (`scripts.exchange`).
    """

    script: str
    is_module: bool = False
    arguments: tuple[str, ...] = ()
    gpu: str = "h100-sxm-80gb"
    cluster: str | None = None
    allocator: str = ""
    nproc: int | None = None
    nodes: int = 1
    rank: int = 0
    steps: int = 3
    period: int = 1
    marker: str = ""
    fast_forward: bool = False
    every_microbatch: bool = False
    moe_load: str = "balanced"
    synthetic: str | None = None
    stand_ins: tuple[str, ...] = ()
    checkpoints: bool = False
    patience_s: float = 600.0
    plan_file: str | None = None
    optimizer_slice_bytes: int = 0
    observe: bool = False
    model: int = 0
    unlimited: bool = False
    quiet: bool = False
    shared: str | None = None
    shown: int = 0
    only: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if not 0 <= self.steps <= _MOST_STEPS:
            raise UsageError(f"{self.steps} steps: expected a number from 1 on, or 0 for all that the script runs")
        if not 0 <= self.rank < self.world_size:
            raise UsageError(f"rank {self.rank}: the world has {self.world_size} ranks")

    @property
    def world_size(self) -> int:
        """Number of GPUs."""
        return (self.nproc or 1) * self.nodes

    @property
    def is_changed(self) -> bool:
        """Whether the model is not run as the script has it: then nobody wants to see what the script says of it."""
        return self.observe or self.plan_file is not None

    def save(self, path: Path) -> None:
        """Write it as JSON."""
        path.write_text(json.dumps(asdict(self)))

    @staticmethod
    def load(path: Path) -> ScriptRequest:
        """Read what `save` has written."""
        document: dict[str, Any] = json.loads(path.read_text())
        tuples = {name: tuple(document[name]) for name in ("arguments", "stand_ins", "only")}
        return ScriptRequest(**{**document, **tuples})


@dataclass(frozen=True, slots=True, kw_only=True)
class ScriptOutcome:
    """How a script ended.

    `exit_code` is its own. `steps` have run, of which number `kept` is in the trace (0: there is none). `error`: why there is
    no trace, unless the script says so itself; `is_uneven`: because a microbatch was unlike those that had been copied.
    `notes`: what was assumed. `printed`: whether it has, or has logged. `model`: the one that plans are for, by the order in
    which models are first called to be trained.
    """

    exit_code: int = 0
    steps: int = 0
    kept: int = 0
    error: str = ""
    is_uneven: bool = False
    notes: tuple[str, ...] = ()
    printed: bool = True
    model: int = 0

    def save(self, path: Path) -> None:
        """Write it as JSON."""
        path.write_text(json.dumps(asdict(self)))

    @staticmethod
    def load(path: Path) -> ScriptOutcome:
        """Read what `save` has written."""
        document: dict[str, Any] = json.loads(path.read_text())
        return ScriptOutcome(**{**document, "notes": tuple(document["notes"])})
