"""The space of a search: knobs and the values that each may take.

A space is a TOML file whose keys are the fields of `Space`; what it leaves out has its default. What changes the numbers that
training computes (float8, a chunked loss) is off unless a file asks for it; the global batch is the job's own.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from annotated_types import Ge, Le, MinLen
from pydantic import AfterValidator, BaseModel, ConfigDict, ValidationError
from pydantic_core import ErrorDetails

from autosac.display.printable import printable
from autosac.errors import UsageError
from autosac.files.documents import TEXT_BYTES, DocumentError, parse_toml, read_bounded
from autosac.limits import MOST_BATCH, MOST_GPUS
from autosac.memory_sim.allocator_config import AllocatorConfig

Checkpointing = Literal["none", "full", "selective-op", "autosac"]
Schedule = Literal["1F1B", "GPipe", "Interleaved1F1B", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV"]
Split = Literal["torchtitan", "balanced"]
Reshard = Literal["always", "never", "default"]
Optimizer = Literal["fused", "foreach", "for-loop"]
CHECKPOINTING: tuple[Checkpointing, ...] = get_args(Checkpointing)
MOST_PIPELINE, MOST_MICROBATCH = 16, 32  # of the values that are tried if the space names none


def _distinct(values: Any) -> Any:
    if values is not None and len(set(values)) < len(values):
        raise ValueError("a value is given twice")
    return values


def _allocators(values: tuple[str, ...]) -> tuple[str, ...]:
    for text in values:
        AllocatorConfig.parse(text)
    return values


Degree = Annotated[int, Ge(1), Le(MOST_GPUS)]
Degrees = Annotated[tuple[Degree, ...], MinLen(1), AfterValidator(_distinct)]
Stages = Annotated[tuple[Annotated[int, Ge(2), Le(MOST_GPUS)], ...], MinLen(1), AfterValidator(_distinct)]
Batches = Annotated[tuple[Annotated[int, Ge(1), Le(MOST_BATCH)], ...], MinLen(1), AfterValidator(_distinct)]
Switch = Annotated[tuple[bool, ...], MinLen(1), AfterValidator(_distinct)]


class Space(BaseModel):
    """The values of every knob. None: what the job and the GPUs allow (see `space.layout.knobs_of`)."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    data_parallel_replicate: Degrees | None = None
    tensor_parallel: Degrees | None = None
    context_parallel: Degrees = (1, 2)
    pipeline_parallel: Degrees | None = None
    pipeline_schedule: Annotated[tuple[Schedule, ...], MinLen(1), AfterValidator(_distinct)] = (
        "1F1B",
        "Interleaved1F1B",
    )
    stages_per_rank: Stages = (2,)
    pipeline_split: Annotated[tuple[Split, ...], MinLen(1), AfterValidator(_distinct)] | None = None
    expert_parallel: Degrees | None = None
    expert_tensor_parallel: Degrees = (1,)
    microbatch: Batches | None = None
    checkpointing: Annotated[tuple[Checkpointing, ...], MinLen(1), AfterValidator(_distinct)] = CHECKPOINTING
    reshard_after_forward: Annotated[tuple[Reshard, ...], MinLen(1), AfterValidator(_distinct)] = ("always", "never")
    compile: Switch | None = None
    async_tensor_parallel: Switch = (False,)
    float8: Switch = (False,)
    optimizer: Annotated[tuple[Optimizer, ...], MinLen(1), AfterValidator(_distinct)] = ("fused",)
    cpu_offload: Switch = (False,)
    activation_offload: Switch = (False,)
    chunk_loss: Switch = (False,)
    allocator: Annotated[tuple[str, ...], MinLen(1), AfterValidator(_distinct), AfterValidator(_allocators)] = (
        "expandable_segments:True",
    )

    @property
    def plans_own_full(self) -> bool:
        """Whether plans are to try TorchTitan's own full checkpointing: where it is not compared by itself."""
        return "full" not in self.checkpointing


MEANINGS = {
    "data_parallel_replicate": "copies of the sharded model (HSDP); FSDP's shards follow from the rest",
    "tensor_parallel": "tensor parallel degree",
    "context_parallel": "context parallel degree",
    "pipeline_parallel": "pipeline parallel degree, in ranks",
    "pipeline_schedule": "pipeline schedule",
    "stages_per_rank": "stages of a rank under Interleaved1F1B and InterleavedZeroBubble (1F1B and GPipe: 1, others: 2)",
    "pipeline_split": "layers of each stage: TorchTitan's own split, or cut so that the slowest stage is as short as possible",
    "expert_parallel": "expert parallel degree (mixture of experts)",
    "expert_tensor_parallel": "1, or as tensor_parallel",
    "microbatch": "sequences that go through the model together; accumulation or pipelining makes the global batch of them",
    "checkpointing": "activation checkpointing; autosac plans it for the memory that is left",
    "reshard_after_forward": "whether FSDP frees gathered parameters after the forward (default: all but the output's)",
    "compile": "torch.compile of the model",
    "async_tensor_parallel": "asynchronous tensor parallelism (needs compile)",
    "float8": "float8 matrix products (changes numerics)",
    "optimizer": "implementation of the optimizer",
    "cpu_offload": "parameters, gradients and optimizer states in host memory",
    "activation_offload": "let autosac's plans offload activations to host memory",
    "chunk_loss": "let autosac's plans compute the loss in chunks of rows (adds up in another order)",
    "allocator": "PYTORCH_CUDA_ALLOC_CONF",
}
assert set(MEANINGS) == set(Space.model_fields)
_DEFAULTS = {  # of knobs whose default depends on the job and the GPUs
    "data_parallel_replicate": "all that divide the data-parallel ranks",
    "tensor_parallel": "all within a node that divide the heads",
    "expert_parallel": "all within a node that divide the experts",
    "pipeline_parallel": f"all up to {MOST_PIPELINE} that divide the GPUs",
    "microbatch": f"all up to {MOST_MICROBATCH}, or the job's own local batch, that divide the global batch",
    "compile": "as the job has it",
    "pipeline_split": "both (TorchTitan 0.3: its own)",
}


def load_space(path: Path) -> Space:
    """The space in a TOML file. UsageError, in one line that names file and knob, if it is none."""
    try:
        document = parse_toml(read_bounded(path, TEXT_BYTES))
    except OSError as e:
        raise UsageError(f"space {path}: {e.strerror or e}") from e
    except DocumentError as e:
        raise UsageError(f"space {path} is not valid TOML: {e}") from e
    return space_of(document, f"space {path}")


def space_of(document: dict[str, Any], where: str = "space") -> Space:
    """The space that a table of knobs describes. A single value stands for a list of one. UsageError if it is none."""
    unknown = [name for name in document if name not in Space.model_fields]
    if unknown:
        known = ", ".join(Space.model_fields)
        raise UsageError(f"{where}: there is no knob {printable(str(unknown[0]))!r}; there are {known}")
    listed = {name: tuple(v) if isinstance(v, list | tuple) else (v,) for name, v in document.items()}
    try:
        return Space(**listed)
    except ValidationError as e:
        first = e.errors()[0]
        given = first["input"] if first["type"] != "too_short" else []
        value = printable(repr(list(given) if isinstance(given, tuple) else given))[:60]
        raise UsageError(f"{where}: {first['loc'][0]} is {value}: {_expected(first)}") from e


def _expected(error: ErrorDetails) -> str:
    """What is allowed, in plain words."""
    context = error.get("ctx", {})
    plain = {
        "int_type": "expected whole numbers",
        "bool_type": "expected true or false",
        "greater_than_equal": f"expected {context.get('ge')} or more",
        "less_than_equal": f"expected {context.get('le')} or less",
        "literal_error": f"expected {context.get('expected')}",
        "too_short": "expected at least one value",
    }
    return plain.get(error["type"], error["msg"].removeprefix("Value error, "))


def space_text(space: Space) -> str:
    """The space as a TOML file, with what each knob means."""
    lines = []
    for name, meaning in MEANINGS.items():
        values = getattr(space, name)
        lines.append(f"# {meaning}")
        if values is None:
            lines.append(f"# {name} = [...]    # by default {_DEFAULTS[name]}")
        else:
            lines.append(f"{name} = [{', '.join(map(_toml, values))}]")
    return "\n".join(lines) + "\n"


def _toml(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else f'"{value}"' if isinstance(value, str) else str(value)
