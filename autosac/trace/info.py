"""What a trace is of: the job, this rank's place in it, and the settings that decide what its operators cost."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, NamedTuple, TypeAlias

TensorLayout: TypeAlias = "tuple[tuple[int, ...], tuple[int, ...], str]"
"""Shape and stride (elements) and dtype of a tensor."""
TracedOperators: TypeAlias = "tuple[tuple[str, tuple[tuple[tuple[int, ...], str], ...]], ...]"
"""Operators by name, each with shape and dtype of its results (-1: a dynamic size)."""


class Parallelism(NamedTuple):
    """The degrees of parallelism, by TorchTitan's names."""

    dp_replicate: int = 1
    dp_shard: int = 1
    cp: int = 1
    tp: int = 1
    pp: int = 1
    ep: int = 1
    etp: int = 1

    @property
    def data_parallel(self) -> int:
        """How many parts of the global batch are trained side by side."""
        return self.dp_replicate * self.dp_shard

    @property
    def sharing(self) -> int:
        """How many ranks work on the same tokens."""
        return self.cp * self.tp * self.pp


_ALONE = Parallelism()


class Cut(NamedTuple):
    """A job with fewer of its layers: it has `layers` of `total`, which repeat every `period` (`autosac.induction`)."""

    layers: int
    period: int
    total: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceInfo:
    """What a trace is of. None, an empty text and an empty collection mean "not known", or that there is none.

    `tokens_per_step` are those of this rank. `parameter_shapes`: global shapes by clean names. `fsdp_units`: the modules that
    FSDP manages as units. `checkpointing`: how the step was checkpointed ("none", "full", "selective-op", "plan", "job");
    `own_checkpointing`: how the job by itself asks to be ("none", "full", "selective", ...).
    `selective_modules`: those under selective checkpointing of the job itself, or under a plan: both cost the host time.
    `preserve_rng_state` and `early_stop`: as in `torch.utils.checkpoint`. `compiled`: the job compiles its model (a step that
    was observed for planning does not run compiled all the same). `matmul_allows_tf32`, `cudnn_allows_tf32`: PyTorch's
    settings for float32 products and convolutions, with PyTorch's defaults. `stage_outputs`: what a pipeline stage sends to
    the next. `moe_load`: how tokens were spread over experts, None if evenly. `loss_chunks`: in how many chunks of rows the
    loss was computed. `traced`: of units of a plan that were compiled, the operators that the compiler traced. `notes`: what
    the user should know of the capture, a line each.
    """

    model: str = ""
    job_fingerprint: str = ""
    job_settings: Mapping[str, str] = field(default_factory=dict)
    gpu: str = ""
    torch_version: str = ""
    torchtitan_version: str = ""
    world_size: int = 1
    rank: int = 0
    local_batch_size: int | None = None
    seq_len: int | None = None
    tokens_per_step: int | None = None
    flops_per_token: float | None = None
    parallelism: Parallelism = _ALONE
    parameter_shapes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    fsdp_units: tuple[str, ...] = ()
    checkpointing: str = ""
    own_checkpointing: str = ""
    selective_modules: tuple[str, ...] = ()
    preserve_rng_state: bool = True
    early_stop: bool = True
    loss_chunks: int = 1
    compiled: bool = False
    matmul_allows_tf32: bool = False
    cudnn_allows_tf32: bool = True
    stage_outputs: tuple[TensorLayout, ...] | None = None
    cut: Cut | None = None
    moe_load: Mapping[str, Any] | None = None
    traced: Mapping[str, TracedOperators] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    def document(self) -> dict[str, Any]:
        """As JSON's types; what is not known is left out."""
        found = {each.name: _plain(getattr(self, each.name)) for each in fields(self)}
        return {name: value for name, value in found.items() if value not in (None, "", [], {})}

    @staticmethod
    def of(document: Mapping[str, Any]) -> TraceInfo:
        """From such a document, which has been checked (`autosac.trace.checks`). Unknown names are ignored."""
        known = {each.name for each in fields(TraceInfo)}
        given = {name: value for name, value in document.items() if name in known}
        for name, read in _READ.items():
            if given.get(name) is not None:
                given[name] = read(given[name])
        return TraceInfo(**given)


def _plain(value: Any) -> Any:
    if isinstance(value, Parallelism):
        return value._asdict()
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    return value


def _layout(row: Any) -> TensorLayout:
    shape, stride, dtype = row
    return tuple(shape), tuple(stride), dtype


def _operators(rows: Any) -> TracedOperators:
    return tuple((name, tuple((tuple(shape), dtype) for shape, dtype in results)) for name, results in rows)


_READ: dict[str, Any] = {
    "parallelism": lambda degrees: Parallelism(**{k: v for k, v in degrees.items() if k in Parallelism._fields}),
    "parameter_shapes": lambda shapes: {name: tuple(shape) for name, shape in shapes.items()},
    "fsdp_units": tuple,
    "selective_modules": tuple,
    "notes": tuple,
    "traced": lambda units: {name: _operators(rows) for name, rows in units.items()},
    "stage_outputs": lambda rows: tuple(_layout(row) for row in rows),
    "cut": lambda numbers: Cut(*numbers),
}
