"""Layouts: configurations but for their checkpointing, and which of a space's are legal.

With W GPUs, degrees r (replicas), s (FSDP shards), c (context), t (tensor), p (pipeline):

    r s c t p = W,   data-parallel ranks d = r s,   sequences of a rank g = global batch / d

A rank works on g sequences, `microbatch` of them at a time: without a pipeline in g / microbatch steps of gradient
accumulation (TorchTitan's local batch is the microbatch), with one in g / microbatch pipeline microbatches (its local batch
is g).

`legal` leaves out what TorchTitan asserts: what does not divide (GPUs, batch, sequence, heads, experts), pipelines with fewer
layers than stages, asynchronous tensor parallelism without compilation; and what PyTorch's schedules do: too few microbatches,
or numbers of them that are no whole rounds. FSDP's ranks are those of shards and context. TorchTitan 0.2 replicates a model
without FSDP (by DDP) only where nothing else divides it, and spreads experts only with FSDP. TorchTitan 0.3 always applies
FSDP, to a single rank as well: there, too, it frees or keeps parameters, which takes another time.
What it refuses for other reasons shows in an evaluation, once.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, NamedTuple

from autosac.configurations.space.space import MOST_MICROBATCH, MOST_PIPELINE, Space
from autosac.configurations.space.splits import module_names, torchtitan_split

SINGLE_STAGE = ("1F1B", "GPipe")  # schedules with one stage on each rank
V_SHAPED = ("ZBVZeroBubble", "DualPipeV")  # with two, which run forth and back over the ranks
USUAL_STAGES = 2  # of a rank under all other schedules, if nothing is said
_OF_PIPELINES = ("schedule", "stages", "split")
_SWITCHES = (
    "compile",
    "async_tensor",
    "float8",
    "optimizer",
    "cpu_offload",
    "activation_offload",
    "chunk_loss",
    "allocator",
)
Setting = str | int | bool | list[list[str]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """A configuration but for its checkpointing. See the module's docstring for the degrees."""

    gpu: str
    replicate: int = 1
    shard: int = 1
    tensor: int = 1
    context: int = 1
    pipeline: int = 1
    expert: int = 1
    expert_tensor: int = 1
    schedule: str = "1F1B"
    stages: int = USUAL_STAGES
    split: str = "torchtitan"
    microbatch: int = 1
    global_batch: int = 1
    reshard: str = "always"
    compile: bool = False
    async_tensor: bool = False
    float8: bool = False
    optimizer: str = "fused"
    cpu_offload: bool = False
    activation_offload: bool = False
    chunk_loss: bool = False
    allocator: str = ""

    @property
    def world_size(self) -> int:
        """GPUs."""
        return self.replicate * self.shard * self.tensor * self.context * self.pipeline

    @property
    def data_parallel(self) -> int:
        """Ranks that work on different sequences."""
        return self.replicate * self.shard

    @property
    def microbatches(self) -> int:
        """How many microbatches a rank works on in a step."""
        return self.global_batch // (self.data_parallel * self.microbatch)

    @property
    def local_batch(self) -> int:
        """TorchTitan's local batch size."""
        return self.microbatch * (self.microbatches if self.pipeline > 1 else 1)

    @property
    def stages_per_rank(self) -> int:
        """Pipeline stages of a rank. `stages` counts where the schedule takes any number of them."""
        return 1 if self.pipeline == 1 or self.schedule in SINGLE_STAGE else self.stages

    @property
    def without_plans(self) -> Layout:
        """The layout without what AutoSAC's plans alone can do: steps without a plan are the same."""
        return replace(self, activation_offload=False, chunk_loss=False)

    @property
    def key(self) -> str:
        """A name that no other layout has, the same in every run."""
        return " ".join(f"{name}={value}" for name, value in asdict(self).items())

    def __str__(self) -> str:
        """The degrees above 1 and the settings that are not usual, short."""
        degrees = {
            "replicate": self.replicate,
            "fsdp": self.shard,
            "tp": self.tensor,
            "cp": self.context,
            "pp": self.pipeline,
            "ep": self.expert,
            "etp": self.expert_tensor,
        }
        words = [f"{name} {degree}" for name, degree in degrees.items() if degree > 1]
        words.append(f"batch {self.microbatch} x {self.microbatches}")
        if self.pipeline > 1:
            words += [self.schedule, *(["balanced"] if self.split == "balanced" else [])]
            words += [f"{self.stages} stages a rank"] if self.stages != USUAL_STAGES else []
        if self.reshard != "always":
            words.append("no reshard" if self.reshard == "never" else "default reshard")
        flags = {
            "compile": self.compile,
            "async tp": self.async_tensor,
            "float8": self.float8,
            "cpu offload": self.cpu_offload,
            "activation offload": self.activation_offload,
            "chunked loss": self.chunk_loss,
            self.optimizer: self.optimizer != "fused",
            f"allocator {self.allocator}": self.allocator not in ("", "expandable_segments:True"),
        }
        return ", ".join([*words, *(name for name, on in flags.items() if on)])

    @property
    def keeps_parameters(self) -> bool:
        """Whether FSDP keeps the layers' gathered parameters from forward to backward. "default" does so in pipelines."""
        return (self.reshard == "never" or (self.reshard == "default" and self.pipeline > 1)) and self.has_shards

    @property
    def keeps_output(self) -> bool:
        """Whether FSDP keeps those of the output, and of what stands beside it."""
        return self.reshard != "always" and self.has_shards

    @property
    def has_shards(self) -> bool:
        """Whether FSDP has anything to gather."""
        return self.shard * self.context > 1


class ModelFacts(NamedTuple):
    """What of a model decides legality, as far as it is known (0: not known). `active_experts`: those of a token, at least;
    `pipelines`: whether any can run; `own_stages`: whether a job can say which layers a stage has; `ends_less`: how many
    layers fewer it gives its first and last stage; `python`: a job of TorchTitan 0.3; `local_batch`: the job's own.
    """

    layers: int = 0
    heads: int = 0
    kv_heads: int = 0
    experts: int = 0
    active_experts: int = 0
    seq_len: int = 0
    pipelines: bool = True
    own_stages: bool = True
    ends_less: tuple[int, int] = (1, 1)
    python: bool = False
    local_batch: int = 0


def settings_of(
    layout: Layout,
    own_converters: tuple[str, ...] = (),
    split: tuple[int, ...] | None = None,
    *,
    python: bool = False,
) -> dict[str, Any]:
    """TorchTitan's settings that make a job so, by their names. `split`: layers of each stage, if not TorchTitan's. `python`:
    as TorchTitan 0.3 names them, which has neither tensor parallelism within experts nor converters.
    """
    settings: dict[str, Any] = {
        "training.local_batch_size": layout.local_batch,
        "training.global_batch_size": layout.global_batch,
        "training.enable_cpu_offload": layout.cpu_offload,
        "parallelism.data_parallel_replicate_degree": layout.replicate,
        "parallelism.data_parallel_shard_degree": layout.shard,
        "parallelism.fsdp_reshard_after_forward": layout.reshard,
        "parallelism.tensor_parallel_degree": layout.tensor,
        "parallelism.context_parallel_degree": layout.context,
        "parallelism.pipeline_parallel_degree": layout.pipeline,
        "parallelism.expert_parallel_degree": layout.expert,
        "parallelism.expert_tensor_parallel_degree": layout.expert_tensor,
        "parallelism.enable_async_tensor_parallel": layout.async_tensor,
        "optimizer.implementation": layout.optimizer,
        "compile.enable": layout.compile,
    }
    if layout.pipeline > 1:
        settings["parallelism.pipeline_parallel_schedule"] = layout.schedule
        settings["parallelism.pipeline_parallel_microbatch_size"] = layout.microbatch
        if split is not None:
            settings["parallelism.module_fqns_per_model_part"] = module_names(split)
    if layout.float8:
        converters = (
            own_converters
            if any("float8" in name for name in own_converters)
            else ("quantize.linear.float8", *own_converters)
        )
        settings["model.converters"] = ",".join(converters)
    if python:
        del settings["parallelism.expert_tensor_parallel_degree"]
        del settings["parallelism.enable_async_tensor_parallel"]
        settings["compile.enable_async_tensor_parallel"] = layout.async_tensor
    return settings


def arguments_of(settings: Mapping[str, Any]) -> tuple[str, ...]:
    """The settings as TorchTitan's arguments."""
    words: list[str] = []
    for name, value in settings.items():
        section, _, key = name.rpartition(".")
        if isinstance(value, bool):
            words.append(f"--{name}" if value else f"--{section}.no-{key}")
        elif isinstance(value, list):
            words += [f"--{name}", repr(value)]
        else:
            words += [f"--{name}", str(value)]
    return tuple(words)


def legal(
    space: Space, gpu: str, world_size: int, gpus_per_node: int, global_batch: int, facts: ModelFacts, compiled: bool
) -> Iterator[Layout]:
    """The legal layouts of a space on so many GPUs. `compiled`: whether the job as it is compiles its model."""
    for layout in _combinations(space, gpu, world_size, gpus_per_node, global_batch, facts, compiled):
        if is_legal(layout, space, facts):
            yield layout


def is_legal(layout: Layout, space: Space, facts: ModelFacts) -> bool:
    """Whether a layout whose degrees fill the GPUs is worth a try. See the module."""
    return _divides(layout, facts) and _is_sensible(layout, space, facts)


def why_none(
    space: Space, world_size: int, gpus_per_node: int, global_batch: int, facts: ModelFacts, compiled: bool
) -> str:
    """What leaves no legal layout on so many GPUs: the first of the conditions that none meets, and the next global batch with
    which there is one.
    """
    reason = _first_unmet(space, world_size, gpus_per_node, global_batch, facts, compiled)
    whole = world_size * min(space.microbatch or (1,))
    more = whole * (global_batch // whole + 1)
    helps = any(True for _ in legal(space, "", world_size, gpus_per_node, more, facts, compiled))
    return f"{reason}; --global-batch {more} would do" if helps else reason


def _first_unmet(
    space: Space, world_size: int, gpus_per_node: int, global_batch: int, facts: ModelFacts, compiled: bool
) -> str:
    for name in ("activation_offload", "chunk_loss"):
        if False not in getattr(space, name) and "autosac" not in space.checkpointing:
            return f'{name} is what AutoSAC\'s plans do: checkpointing needs "autosac"'
    values = knobs_of(space, world_size, gpus_per_node, global_batch, facts, compiled)
    degrees = itertools.product(*(values[name] for name in ("tensor", "context", "pipeline")))
    ranks = {world_size // math.prod(some) for some in degrees if world_size % math.prod(some) == 0}
    if not ranks:
        return f"no product of tensor, context and pipeline_parallel divides {world_size} GPUs"
    if not any(of_all % copies == 0 for of_all in ranks for copies in values["replicate"]):
        return f"data_parallel_replicate does not divide the data-parallel ranks ({_either(ranks)})"
    if not any(global_batch % (of_all * size) == 0 for of_all in ranks for size in values["microbatch"]):
        return (
            f"a global batch of {global_batch} is no multiple of the data-parallel ranks ({_either(ranks)}) times the "
            f"microbatch ({_either(values['microbatch'])})"
        )
    if facts.seq_len % 2 and not facts.python:
        return f"TorchTitan takes sequences of an even number of tokens, not of {facts.seq_len}"
    made = _combinations(space, "", world_size, gpus_per_node, global_batch, facts, compiled)
    if not any(_divides(layout, facts) for layout in made):
        known = {"heads": facts.heads, "key and value heads": facts.kv_heads, "layers": facts.layers}
        known |= {"experts": facts.experts, "tokens of a sequence": facts.seq_len}
        counts = ", ".join(f"{count} {what}" for what, count in known.items() if count)
        return f"the degrees do not divide the model ({counts}{'' if facts.pipelines else '; it cannot be cut into stages'})"
    return (
        "what is left TorchTitan refuses (replicas without shards beside other parallelism, asynchronous tensor parallelism "
        "without compile, CPU offload without shards, pipelines with too few microbatches)"
    )


def _either(values: Iterable[int]) -> str:
    return " or ".join(map(str, sorted(values)))


def knobs_of(
    space: Space, world_size: int, gpus_per_node: int, global_batch: int, facts: ModelFacts, compiled: bool
) -> dict[str, tuple[Any, ...]]:
    """The values of each knob of a layout, on so many GPUs; `layout_of` makes layouts of them."""
    in_node = divisors(min(gpus_per_node, world_size))
    return {
        "tensor": space.tensor_parallel or _dividing(in_node, facts.heads, facts.kv_heads),
        "context": space.context_parallel,
        "pipeline": space.pipeline_parallel or _up_to(MOST_PIPELINE, world_size),
        "replicate": space.data_parallel_replicate or divisors(world_size),
        "expert": (space.expert_parallel or _dividing(in_node, facts.experts)) if facts.experts else (1,),
        "expert_tensor": space.expert_tensor_parallel,
        "schedule": space.pipeline_schedule,
        "stages": space.stages_per_rank,
        "split": space.pipeline_split or (("torchtitan", "balanced") if facts.own_stages else ("torchtitan",)),
        "microbatch": space.microbatch or _up_to(max(MOST_MICROBATCH, facts.local_batch), global_batch),
        "reshard": space.reshard_after_forward,
        "compile": space.compile or (compiled,),
        "async_tensor": space.async_tensor_parallel,
        "float8": space.float8,
        "optimizer": space.optimizer,
        "cpu_offload": space.cpu_offload,
        "activation_offload": space.activation_offload,
        "chunk_loss": space.chunk_loss,
        "allocator": space.allocator,
    }


def _dividing(degrees: Iterable[int], *counts: int) -> tuple[int, ...]:
    return tuple(degree for degree in degrees if not any(count % degree for count in counts))


def _up_to(most: int, number: int) -> tuple[int, ...]:
    """The divisors of a number that are no more than `most`."""
    return tuple(d for d in range(1, min(most, number) + 1) if number % d == 0)


def layout_of(choice: Mapping[str, Any], gpu: str, world_size: int, global_batch: int) -> Layout | None:
    """The layout of a value for each knob; None if degrees or batch do not divide what they have to."""
    ranks, rest = divmod(world_size, choice["tensor"] * choice["context"] * choice["pipeline"])
    if rest or ranks == 0 or ranks % choice["replicate"] or global_batch % (ranks * choice["microbatch"]):
        return None
    own = {name: (choice[name],) for name in _OF_PIPELINES}
    ((schedule, stages, split),) = _pipelines(own, choice["pipeline"])
    choice = {**choice, "schedule": schedule, "stages": stages, "split": split}
    return Layout(gpu=gpu, shard=ranks // choice["replicate"], global_batch=global_batch, **choice)


def _pipelines(values: Mapping[str, Sequence[Any]], ranks: int) -> list[tuple[str, int, str]]:
    """The different pipelines (schedule, stages of a rank, split) of so many ranks."""
    if ranks == 1:
        return [("1F1B", USUAL_STAGES, "torchtitan")]
    found = itertools.product(*(values[name] for name in _OF_PIPELINES))
    return list(
        dict.fromkeys(
            (schedule, stages if schedule.startswith("Interleaved") else USUAL_STAGES, split)
            for schedule, stages, split in found
        )
    )


def _combinations(
    space: Space, gpu: str, world_size: int, gpus_per_node: int, global_batch: int, facts: ModelFacts, compiled: bool
) -> Iterator[Layout]:
    """All layouts whose degrees fill the GPUs and whose batches divide the global batch."""
    values = knobs_of(space, world_size, gpus_per_node, global_batch, facts, compiled)
    names = ("expert", "expert_tensor", "microbatch", "reshard", *_SWITCHES)
    for tensor, context, pipeline in itertools.product(values["tensor"], values["context"], values["pipeline"]):
        ranks, remainder = divmod(world_size, tensor * context * pipeline)
        if remainder or ranks == 0:
            continue
        fixed = {"tensor": tensor, "context": context, "pipeline": pipeline}
        few = {**values, "microbatch": [b for b in values["microbatch"] if global_batch % (ranks * b) == 0]}
        replicas = [r for r in values["replicate"] if ranks % r == 0]
        others = itertools.product(*(few[name] for name in names))
        for (schedule, stages, split), replicate, other in itertools.product(
            _pipelines(values, pipeline), replicas, others
        ):
            more = {"schedule": schedule, "stages": stages, "split": split, "replicate": replicate}
            layout = layout_of({**fixed, **more, **dict(zip(names, other, strict=True))}, gpu, world_size, global_batch)
            if layout is not None:
                yield layout


def _divides(layout: Layout, facts: ModelFacts) -> bool:
    """Whether heads, sequence, experts and layers can be divided as the degrees ask for."""
    tensor, context, expert = layout.tensor, layout.context, layout.expert
    if layout.pipeline > 1 and not facts.pipelines:
        return False
    if any(heads % tensor for heads in (facts.heads, facts.kv_heads)):
        return False
    if facts.seq_len % (tensor * (1 if facts.python and context == 1 else 2 * context)):
        return False
    if (
        facts.experts % expert
        or (layout.expert_tensor not in (1, tensor))
        or (expert == 1 and layout.expert_tensor > 1)
    ):
        return False
    # Experts are spread over ranks of FSDP's, context and tensor parallelism.
    borrowed = layout.shard * context * (tensor if layout.expert_tensor == 1 else 1)
    if expert > 1 and (borrowed % expert or not _has_fsdp(layout, facts)):
        return False
    stages = layout.pipeline * layout.stages_per_rank
    if not facts.layers or layout.pipeline == 1:
        return True
    if layout.split == "balanced":  # which gives each stage a layer
        return facts.layers >= stages
    return torchtitan_split(facts.layers, stages, *facts.ends_less) is not None


def _has_fsdp(layout: Layout, facts: ModelFacts) -> bool:
    return facts.python or layout.shard * layout.context > 1


def _is_sensible(layout: Layout, space: Space, facts: ModelFacts) -> bool:
    """Not refused by TorchTitan, and no second name of another layout."""
    if not _has_fsdp(layout, facts):
        if layout.replicate > 1 and layout.tensor * layout.pipeline > 1:
            return False  # DDP beside other parallelism
        if layout.cpu_offload or layout.reshard != space.reshard_after_forward[0]:
            return False  # there is nothing to offload or to reshard
    if layout.pipeline > 1 and layout.reshard == "default" and "never" in space.reshard_after_forward:
        return False  # the same
    if layout.async_tensor and not (layout.tensor > 1 and layout.compile):
        return False
    if (layout.activation_offload or layout.chunk_loss) and "autosac" not in space.checkpointing:
        return False  # they are AutoSAC's plans'
    return layout.pipeline == 1 or _is_scheduled(layout)


def checkpointing_of(layout: Layout, space: Space) -> tuple[str, ...]:
    """The ways of checkpointing to work out of a layout: of one that lets plans do more the plan, if the space has the layout
    without, whose other steps are the same.
    """
    is_told = False in space.activation_offload and False in space.chunk_loss
    return ("autosac",) if is_told and layout != layout.without_plans else space.checkpointing


def _is_scheduled(layout: Layout) -> bool:
    """Whether PyTorch's schedule takes so many microbatches."""
    ranks, m = layout.pipeline, layout.microbatches
    if layout.schedule == "1F1B":
        return m >= ranks
    if layout.schedule == "DualPipeV":
        return m >= 2 * ranks
    if layout.schedule.startswith("Interleaved"):  # in rounds of as many
        return m >= 1 and m % max(1, m // ranks) == 0
    return m >= 1


def divisors(number: int) -> tuple[int, ...]:
    """Ascending."""
    return tuple(d for d in range(1, number + 1) if number % d == 0)
