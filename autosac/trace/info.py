"""What a trace is of: the job, this rank's place in it, and the settings that decide what its operators cost."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Annotated, Any, ClassVar, NamedTuple, TypeAlias

from autosac.files.schema import STRICT, Fault, Within, fitted
from autosac.limits import MOST_GPUS, MOST_LOSS_CHUNKS

MOST, MOST_BYTES = 2**62, 2**50  # of any number, and of bytes
Size = Annotated[int, Within(0, MOST_BYTES)]
DynamicSize = Annotated[int, Within(-1, MOST_BYTES)]
Count = Annotated[int, Within(1, MOST)]
Degree = Annotated[int, Within(1, MOST_GPUS)]
TensorLayout: TypeAlias = tuple[tuple[Size, ...], tuple[Size, ...], str]
"""Shape and stride (elements) and dtype of a tensor."""
TracedOperators: TypeAlias = tuple[tuple[str, tuple[tuple[tuple[DynamicSize, ...], str], ...]], ...]
"""Operators by name, each with shape and dtype of its results (-1: a dynamic size)."""


class Parallelism(NamedTuple):
    """The degrees of parallelism, by TorchTitan's names."""

    dp_replicate: Degree = 1
    dp_shard: Degree = 1
    cp: Degree = 1
    tp: Degree = 1
    pp: Degree = 1
    ep: Degree = 1
    etp: Degree = 1

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

    layers: Size
    period: Size
    total: Size


class LoadDraw(NamedTuple):
    """Which draw of the expert load a step is of (`autosac.capture.moe_load.MoELoad`)."""

    kind: str = ""
    exponent: Annotated[float, Within(0, 1e3)] = 0.0
    seed: int = 0
    draw: int = 0
    busiest: bool = False


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
    loss was computed. `optimizer_slice_bytes`: how much of the parameters the optimizer worked on at once (0: all).
    `traced`: of units of a plan that were compiled, the operators that the compiler traced. `notes`: what the user should
    know of the capture, a line each.
    """

    __pydantic_config__: ClassVar[Any] = STRICT

    model: str = ""
    job_fingerprint: str = ""
    job_settings: Mapping[str, str] = field(default_factory=dict)
    gpu: str = ""
    torch_version: str = ""
    torchtitan_version: str = ""
    world_size: Degree = 1
    rank: Annotated[int, Within(0, MOST_GPUS - 1)] = 0
    local_batch_size: Count | None = None
    seq_len: Count | None = None
    tokens_per_step: Annotated[int, Within(0, MOST)] | None = None
    flops_per_token: Annotated[float, Within(0, 1e30)] | None = None
    parallelism: Parallelism = _ALONE
    parameter_shapes: Mapping[str, tuple[Size, ...]] = field(default_factory=dict)
    fsdp_units: tuple[str, ...] = ()
    checkpointing: str = ""
    own_checkpointing: str = ""
    selective_modules: tuple[str, ...] = ()
    preserve_rng_state: bool = True
    early_stop: bool = True
    loss_chunks: Annotated[int, Within(1, MOST_LOSS_CHUNKS)] = 1
    optimizer_slice_bytes: Annotated[int, Within(0, MOST)] = 0
    compiled: bool = False
    matmul_allows_tf32: bool = False
    cudnn_allows_tf32: bool = True
    stage_outputs: tuple[TensorLayout, ...] | None = None
    cut: Cut | None = None
    moe_load: LoadDraw | None = None
    traced: Mapping[str, TracedOperators] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    def document(self) -> dict[str, Any]:
        """As JSON's types; what is not known is left out."""
        found = {each.name: _plain(getattr(self, each.name)) for each in fields(self)}
        return {name: value for name, value in found.items() if value not in (None, "", [], {})}

    @staticmethod
    def of(document: Mapping[str, Any]) -> TraceInfo:
        """From such a document. ValueError, which says where it is wrong and how, if it is none."""
        found = fitted(document, TraceInfo)
        if isinstance(found, Fault):
            raise ValueError(f"info.{found.text}" if found.place else found.text.replace("it", "info", 1))
        return found


def _plain(value: Any) -> Any:
    if isinstance(value, Parallelism | LoadDraw):
        return value._asdict()
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    return value
