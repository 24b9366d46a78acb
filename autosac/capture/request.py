"""What is to be captured, as plain data that can be sent to another process."""

from __future__ import annotations

import json
import re
from dataclasses import asdict, dataclass, field
from typing import Any

from autosac.capture.moe_load import MoELoad
from autosac.errors import UsageError
from autosac.target import TargetGPU
from autosac.trace import TensorLayout

_INTERVAL = re.compile(r"[1-9][0-9]{0,8}")


@dataclass(frozen=True, slots=True, kw_only=True)
class TitanRequest:
    """One capture of a TorchTitan job.

    `config_file` is the job's TOML, or MODULE:CONFIG for TorchTitan 0.3 (`autosac.titan.version`), `overrides`
    TorchTitan's own command-line arguments. `checkpointing` replaces the job's activation checkpointing: "job" (leave it),
    "none", "full", "selective-op", "selective-<N>", or "plan" with the file `plan_file` (which, with another one, is a plan
    that is this way of checkpointing). `observe` records the regions of all
    modules that could be checkpointed (implies "none", and a model that is not compiled). `stage_inputs`: with pipeline
    parallelism, what later stages receive (shape, stride, dtype), as the capture of the first stage's rank gives it in its
    trace's info ("stage_outputs"). `layers` is how many of its layers the model has, None for all; `cut` the index of a cut
    made where the layers are alike, -2 for the smallest (`autosac.capture.jobs.layers`), and `cuts` how many of them are to
    tell the whole. `loss_chunks`: in how many chunks of rows the loss is computed, and `optimizer_slice_bytes` how much of
    the parameters the optimizer works on at once (0: all; a plan decides both itself). `moe_load`: how tokens spread over the
    experts of a mixture. `repeats`: microbatches that do the same need not all run (`autosac.capture.jobs.microbatches`,
    `titan_accumulation`).
    """

    config_file: str | None
    overrides: tuple[str, ...] = ()
    world_size: int = 1
    rank: int = 0
    gpu: TargetGPU = field(default_factory=TargetGPU)
    checkpointing: str = "job"
    plan_file: str | None = None
    observe: bool = False
    steps: int = 2
    ranks_per_node: int = 8
    stage_inputs: tuple[TensorLayout, ...] | None = None
    layers: int | None = None
    cut: int | None = None
    cuts: int = 3
    loss_chunks: int = 1
    optimizer_slice_bytes: int = 0
    moe_load: MoELoad = field(default_factory=MoELoad)
    repeats: bool = True

    def __post_init__(self) -> None:
        if self.world_size < 1:
            raise UsageError(f"world size {self.world_size}: it must be at least 1")
        if not 0 <= self.rank < self.world_size:
            raise UsageError(f"rank {self.rank} is not within a world of {self.world_size}")
        if self.layers is not None and self.layers < 1:
            raise UsageError(f"{self.layers} layers: there must be at least one")
        self.checkpointing_mode()
        if self.steps < 2:
            raise UsageError("at least two steps are needed: the first creates the optimizer's states and caches")

    @property
    def is_decisive(self) -> bool:
        """Whether a plan is made with this capture or verified by it, or it is of the job as it is; others are shown beside
        it.
        """
        return self.plan_file is not None or self.checkpointing in ("none", "job")

    def checkpointing_mode(self) -> str:
        """What the job's own checkpointing is replaced by: "job" for nothing, "none", "full", "selective-op" or
        "selective-<N>". UsageError for another one.
        """
        mode = "none" if self.observe or self.checkpointing == "plan" else self.checkpointing
        if mode not in ("job", "none", "full"):
            kind, _, option = mode.partition("-")
            if kind != "selective" or not (option == "op" or _INTERVAL.fullmatch(option)):
                raise UsageError(
                    f"activation checkpointing {mode!r}: expected none, full, selective-op or selective-N (N >= 1)"
                )
        return mode

    def to_json(self) -> str:
        """One line of JSON."""
        return json.dumps(asdict(self))

    @staticmethod
    def from_json(text: str) -> TitanRequest:
        """The inverse of `to_json`."""
        document: dict[str, Any] = json.loads(text)
        gpu = document.pop("gpu")
        gpu["compute_capability"] = tuple(gpu["compute_capability"])
        document["overrides"] = tuple(document["overrides"])
        if document["stage_inputs"] is not None:
            document["stage_inputs"] = tuple((tuple(a), tuple(b), dtype) for a, b, dtype in document["stage_inputs"])
        load = MoELoad(**document.pop("moe_load"))
        return TitanRequest(gpu=TargetGPU(**gpu), moe_load=load, **document)
