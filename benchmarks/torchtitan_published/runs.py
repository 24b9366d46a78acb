"""The published runs: read from their files, and expressed as TorchTitan jobs where that can be done.

`Run` is one row in common terms; `captures` are the requests for its distinct ranks (one for each pipeline stage).
"""

from __future__ import annotations

import csv
import importlib.util
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from autosac.capture.request import TitanRequest
from autosac.errors import UsageError
from autosac.target import TargetGPU
from benchmarks.torchtitan_published.eras import MARCH_2025, NOW, WIDE, Era, era_of

PUBLISHED = "torchtitan_published.csv"
UNSEEN = Path(__file__).parent / "unseen.csv"
"""Runs that were found in TorchTitan's history and threads after all models were fitted, in the columns of `PUBLISHED`."""
HELD_OUT = Path(__file__).parent / "held_out.csv"
"""Runs of pages whose other rows were looked at: the rest of TorchTitan's page of December 2024, and torchao's tables."""
TORCHSIM_MEMORY = "torchsim_70b_memory.csv"
TORCHSIM_TIME = "torchsim_70b_time.csv"
_FOUR_PER_NODE = str(Path(__file__).parent / "h100_4_per_node.toml")
# By a word of a row's source or notes: its nodes.
_NODES = {
    "KempnerForge": str(Path(__file__).parent / "h200_4_per_node.toml"),
    "400 Gb/s a node": str(Path(__file__).parent / "a100_400_gbit.toml"),
    "800 Gb/s a node": str(Path(__file__).parent / "h100_800_gbit.toml"),
}
_SETS_THE_NETWORK = (
    "Llama-3.1-70B",
    "FSDP",
    "128",
    "2",
    "64",
    "selective-op",
)  # nearly all of its step is communication
# By the beginning of a model's name: TorchTitan's family, and the beginning of its flavors there.
_MODELS = {
    **dict.fromkeys(("Llama3-", "Llama-3-", "Llama-3.1-", "Llama3.1-"), ("llama3", "")),
    "Llama2-": ("llama3", "llama2_"),
    "Qwen3-": ("qwen3", ""),
    "DeepSeek-V3-": ("deepseek_v3", ""),
    "gpt-oss-": ("gpt_oss", ""),
}


# Sources whose A100s are boards with a cap of 330 W ("PG509-210", TorchTitan's commit db52d57ca).
_OF_META = "pytorch/torchtitan "
# Sources whose runs were not started by TorchTitan's launcher, and so without expandable segments. The page of the second
# gives its torchrun command; of the others it shows in the memory that they report: see docs/published.md.
_WITHOUT_LAUNCHER = (
    *("llama3_h100_202412_torchtitan", "llama3-8b_h200_202506_trainy", "commit d66b72a6a"),
    *("KempnerForge", "fms-fsdp"),
)
# Of these sources the runs on several nodes were started by a launcher that makes TorchTitan's settings: the memory of all
# five shows it.
_LAUNCHED_ON_NODES = ("commit d66b72a6a",)
_NODE = 8  # GPUs
# The page's table of context parallelism is of runs that the launcher started: one row shows it, the others confirm it.
_LAUNCHED_TABLE = "Table 2 (CP)"
# "Float8" on this page is TorchTitan's recipe of its time, with FSDP's all-gathers in float8: the memory of its pipelines,
# which keep gathered parameters, shows it.
_GATHERS_FLOAT8 = ("llama3_h100_202412_torchtitan",)
# Rows that say otherwise than the run's own log, or than the job file of the commit that the log is in.
_FULLY_CHECKPOINTED = ("commit f738a03bf", "commit b109f7d71")
# Of the second the log shows DeepSeek-V3's vocabulary, its tokenizer's, in place of the flavor's 102,400.
_WIDE_VOCABULARY = ("commit b109f7d71",)
# The parameters of this tutorial's runs were in bf16, which its command does not say: from the first step to the later ones
# reserved memory grows by 3.65 GiB, what the optimizer's states then take on each of 8 GPUs (7.5 GiB in fp32).
_PARAMETERS_IN_BF16 = ("eager_tutorials/pretraining.rst", "KempnerForge")

_MIXTURES = ("DeepSeek-V3", "gpt-oss", "-A3B")  # in models' names
# By a word of a row's notes: why its published time is no check.
_NOT_COMPARED = {
    "deterministic": "deterministic kernels are not priced",
    "power cap": "the power cap is not published",
}
# By words of a row's notes: what the eras' train specs read in a job's description, for which TorchTitan has no argument.
_DESCRIBED = {"chunked cross-entropy": "chunked loss", "gradients reduced in bf16": "gradients reduced in bf16"}


class UnreproducibleError(UsageError):
    """The installed TorchTitan cannot express the run; the message is the reason, in one line."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One published run. Degrees are TorchTitan's; figures are None where none were published.

    `launched`: by TorchTitan's launcher. `memory_gib` is the reserved peak, unless `allocated`; `oom`: it ran out of memory.
    `made`: the month ("2025-03").
    `not_compared` says why the published time is no check of the simulated one ("": it is).
    """

    case: str
    model: str
    gpu: str
    gpus: int
    era: Era
    cluster: str | None = None
    replicate: int = 1
    shard: int = 1
    tensor: int = 1
    pipeline: int = 1
    context: int = 1
    expert: int = 1
    schedule: str = ""
    local_batch: int = 1
    global_batch: int = -1
    sequence: int = 8192
    checkpointing: str = "none"
    compiled: bool = False
    precision: str = "bf16"
    notes: str = ""
    source: str = ""
    made: str = ""
    launched: bool = True
    bf16_parameters: bool = False
    wide_vocabulary: bool = False
    memory_gib: float | None = None
    allocated: bool = False
    oom: bool = False
    tokens_per_second: float | None = None
    step_ms: float | None = None
    not_compared: str = ""

    @property
    def is_mixture(self) -> bool:
        """Whether the model is a mixture of experts."""
        return any(name in self.model for name in _MIXTURES)

    @property
    def is_uneven(self) -> bool:
        """Whether ranks wait for the one whose experts get most tokens: published figures are of a run's first steps."""
        return self.expert > 1 and self.pipeline == 1 and "equally loaded" not in self.notes

    @property
    def group(self) -> tuple[object, ...]:
        """What runs that differ in checkpointing only have in common."""
        job = (self.model, self.gpu, self.gpus, self.tensor, self.pipeline, self.context, self.local_batch)
        return (*job, self.sequence, self.compiled, self.precision, self.era.name, self.cluster)

    @property
    def allocator(self) -> str:
        """PyTorch's allocator settings: TorchTitan's launcher makes them. On GPUs of AMD they had no effect before 2026."""
        return self.era.allocator if self.launched and not self.gpu.startswith("mi") else ""

    def describe(self) -> str:
        """The parallelism in a few letters, then batch and sequence."""
        degrees = (("ddp", self.replicate), ("fsdp", self.shard), ("tp", self.tensor), ("pp", self.pipeline))
        parts = [f"{name}{n}" for name, n in (*degrees, ("cp", self.context), ("ep", self.expert)) if n > 1]
        return f"{' '.join(parts)} {self.local_batch}x{self.sequence}"

    def overrides(self) -> tuple[str, ...]:
        """TorchTitan's arguments. UnreproducibleError if the installed version cannot express the run."""
        parallel = {
            "data_parallel_replicate_degree": self.replicate,
            "data_parallel_shard_degree": self.shard,
            "tensor_parallel_degree": self.tensor,
            "pipeline_parallel_degree": self.pipeline,
            "context_parallel_degree": self.context,
            "expert_parallel_degree": self.expert,
        }
        family, flavor = self._family_and_flavor()
        arguments = [
            *self.era.overrides(family),
            *("--model.flavor", flavor),
            *("--training.local_batch_size", str(self.local_batch)),
            *("--training.global_batch_size", str(self.global_batch)),
            *("--training.seq_len", str(self.sequence)),
            *(text for name, n in parallel.items() for text in (f"--parallelism.{name}", str(n))),
        ]
        if self.pipeline > 1:
            arguments += self._pipeline()
        if self.compiled:
            components = ("model", "loss") if self.era.compiles_loss else ("model",)
            if "only the loss is compiled" in self.notes:
                components = ("loss",)
            arguments += ["--compile.enable", "--compile.components", ",".join(components)]
        for policy in ("always", "never"):
            if f"reshard_after_forward={policy}" in self.notes:
                arguments += ["--parallelism.fsdp_reshard_after_forward", policy]
        if self.bf16_parameters:
            arguments += ["--training.dtype", "bfloat16"]
        described = [text for word, text in _DESCRIBED.items() if word in self.notes]
        if described:
            arguments += ["--job.description", ", ".join(described)]
        if "asynctp" in self.precision.lower():
            arguments += ["--parallelism.enable_async_tensor_parallel"]
        return (*arguments, *self._precision())

    def _family_and_flavor(self) -> tuple[str, str]:
        for prefix, (family, flavor) in _MODELS.items():
            if self.model.startswith(prefix):
                if flavor and self.era is NOW:
                    break
                return family, flavor + self.model.removeprefix(prefix) + (WIDE if self.wide_vocabulary else "")
        raise UnreproducibleError(f"TorchTitan 0.2.2 has no flavor for {self.model}")

    def _pipeline(self) -> list[str]:
        arguments = ["--parallelism.pipeline_parallel_schedule", self.schedule] if self.schedule else []
        if self.era.microbatch_per_rank:
            size = max(1, self.local_batch // self.pipeline)
            arguments += ["--parallelism.pipeline_parallel_microbatch_size", str(size)]
        return arguments

    def _precision(self) -> tuple[str, ...]:
        """The output layer stays in bf16: all of TorchTitan's job files except it from float8."""
        kind = self.precision.lower().partition(" + asynctp")[0]
        if kind == "bf16":
            return ()
        if "fp8" not in kind and "float8" not in kind:
            raise UnreproducibleError(f"precision {self.precision!r} is unknown")
        if importlib.util.find_spec("torchao") is None:
            raise UnreproducibleError(f"{self.precision} needs torchao, which is not installed")
        arguments: tuple[str, ...] = ("--model.converters", "quantize.linear.float8")
        kept = "output,attention.wk,attention.wv" if "wk and wv in bf16" in self.notes else "output"
        arguments += ("--quantize.linear.float8.filter_fqns", kept)
        if "row" in kind:
            recipe = "rowwise_with_gw_hp" if "gw_hp" in kind else "rowwise"
            return (*arguments, "--quantize.linear.float8.recipe_name", recipe)
        if "all-gather" not in kind:
            return arguments
        return (
            *arguments,
            "--quantize.linear.float8.enable_fsdp_float8_all_gather",
            "--quantize.linear.float8.precompute_float8_dynamic_scale_for_fsdp",
        )

    def request(self, gpu: TargetGPU, ranks_per_node: int) -> TitanRequest:
        """The capture of the first stage's rank. UnreproducibleError as for `overrides`."""
        return TitanRequest(
            config_file=None,
            overrides=self.overrides(),
            world_size=self.gpus,
            gpu=gpu,
            checkpointing=self.checkpointing,
            ranks_per_node=ranks_per_node,
        )

    def later_ranks(self) -> range:
        """One rank for each later pipeline stage; the pipeline is the outermost dimension."""
        stride = self.gpus // self.pipeline
        return range(stride, self.gpus, stride)


def read_runs(folder: Path) -> list[Run]:
    """All runs of the files in `folder`. UsageError if the main one is missing or malformed."""
    return [*_published(folder / PUBLISHED), *_torchsim(folder)]


def read_unseen() -> list[Run]:
    """The runs of `UNSEEN`."""
    return list(_published(UNSEEN))


def read_held_out() -> list[Run]:
    """The runs of `HELD_OUT`."""
    return list(_published(HELD_OUT))


def _rows(path: Path) -> list[dict[str, str]]:
    try:
        with path.open(newline="") as file:
            return list(csv.DictReader(file))
    except OSError as e:
        raise UsageError(f"{path}: {e.strerror or e}") from e


def _published(path: Path) -> Iterator[Run]:
    for row in _rows(path):
        try:
            yield _published_run(row)
        except (KeyError, ValueError) as e:
            raise UsageError(f"{path}, {row.get('case_id')}: {e!r}") from e


def _published_run(row: dict[str, str]) -> Run:
    memory, speed = row["mem_gib"], row["tokens_per_s_per_gpu"]
    source = row.get("source", "")
    degree = {name: int(row[name] or 1) for name in ("dp_replicate", "fsdp_shard", "tp", "pp", "cp", "ep")}
    return Run(
        case=row["case_id"],
        model=row["model"],
        gpu=_gpu(row["hardware"], float(row["gpu_mem_gib"]), source),
        gpus=int(row["n_gpus"]),
        era=era_of(row["date"], row["notes"] + source),
        cluster=next((file for word, file in _NODES.items() if word in source + row["notes"]), None),
        replicate=degree["dp_replicate"],
        shard=degree["fsdp_shard"],
        tensor=degree["tp"],
        pipeline=degree["pp"],
        context=degree["cp"],
        expert=degree["ep"],
        schedule=row["schedule"],
        local_batch=int(row["local_batch"]),
        global_batch=int(row["global_batch"]) if row["global_batch"] else -1,
        sequence=int(row["seq_len"]),
        checkpointing="full" if _is_from(source, _FULLY_CHECKPOINTED) else _checkpointing(row["ac_mode"]),
        compiled=row["compile"] == "yes",
        precision=_precision(row["low_precision"], source),
        notes=row["notes"],
        source=source,
        made=row["date"],
        launched=_is_launched(source, row["notes"], int(row["n_gpus"])),
        bf16_parameters=_is_from(source, _PARAMETERS_IN_BF16),
        wide_vocabulary=_is_from(source, _WIDE_VOCABULARY),
        memory_gib=float(memory) if memory not in ("", "OOM") else None,
        oom=memory == "OOM",
        tokens_per_second=float(speed) if speed else None,
        step_ms=1e3 * float(row["step_time_s"]) if row["step_time_s"] else None,
        not_compared=next((why for word, why in _NOT_COMPARED.items() if word in row["notes"]), ""),
    )


def _is_launched(source: str, notes: str, gpus: int) -> bool:
    if _LAUNCHED_TABLE in notes or (gpus > _NODE and _is_from(source, _LAUNCHED_ON_NODES)):
        return True
    return not _is_from(source, _WITHOUT_LAUNCHER)


def _precision(text: str, source: str) -> str:
    gathers = _is_from(source, _GATHERS_FLOAT8)
    return text.replace("tensorwise", "tensorwise + fp8 all-gather") if gathers else text


def _is_from(source: str, sources: tuple[str, ...]) -> bool:
    return any(each in source for each in sources)


def _gpu(hardware: str, memory_gib: float, source: str) -> str:
    if "A100" in hardware and memory_gib > 60:
        return "a100-sxm-80gb-330w" if source.startswith(_OF_META) else "a100-sxm-80gb"
    if "A100" in hardware:
        return "a100-sxm-40gb"
    if "H100" in hardware:
        return "h100-sxm-96gb-meta" if memory_gib > 90 else "h100-sxm-80gb"
    if "H200" in hardware:
        return "h200-sxm-141gb"
    if "B200" in hardware:
        return "b200-sxm-180gb"
    if "MI300X" in hardware:
        return "mi300x"
    raise ValueError(f"no profile for {hardware!r}")


def _checkpointing(text: str) -> str:
    """``selective-layer(2)`` is what the command line calls ``selective-2``."""
    if text.startswith("selective-layer(") and text.endswith(")"):
        return "selective-" + text[len("selective-layer(") : -1]
    return text


def _torchsim(folder: Path) -> Iterator[Run]:
    """Spring of 2025, four GPUs a node; the paper gives no tensor-parallel degree: a node's GPUs are assumed."""
    jobs: dict[tuple[str, ...], dict[str, float]] = {}
    for file, figure in ((TORCHSIM_MEMORY, "peak_gib_measured"), (TORCHSIM_TIME, "step_ms_measured")):
        if not (folder / file).is_file():
            continue
        for row in _rows(folder / file):
            batch = row.get("local_batch") or row["batch"]
            job = (row["model"], row["parallelism"], row["n_gpus"], batch, row["seq_len"], row["ac_mode"])
            jobs.setdefault(job, {})[figure] = float(row[figure])
    for number, (key, figures) in enumerate(jobs.items()):
        model, parallelism, gpus, batch, sequence, checkpointing = key
        tensor = 4 if "TP" in parallelism else 1
        yield Run(
            case=f"TS{number + 1}",
            model=model,
            gpu="h100-sxm-80gb",
            cluster=_FOUR_PER_NODE,
            gpus=int(gpus),
            era=MARCH_2025,
            source="the TorchSim paper",
            made="2025-03",
            shard=int(gpus) // tensor,
            tensor=tensor,
            local_batch=int(batch),
            sequence=int(sequence),
            checkpointing=_checkpointing(checkpointing),
            memory_gib=figures.get("peak_gib_measured"),
            allocated=True,
            step_ms=figures.get("step_ms_measured"),
            not_compared="sets the network's rate" if key == _SETS_THE_NETWORK else "",
        )
