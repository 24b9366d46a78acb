"""Jobs that train for real on the CPU: TorchTitan's models at debug size, over the ways to parallelize them."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

_ROOT = Path(__file__).resolve().parents[2]
_PATIENCE_S = 600
TEXT = """[job]
dump_folder = "{folder}/out"
custom_config_module = "autosac.integrations.torchtitan.job_config"
[experimental]
custom_import = "autosac.integrations.torchtitan"
[model]
name = "{model}"
flavor = "{flavor}"
[training]
local_batch_size = {batch}
seq_len = {length}
steps = {steps}
[metrics]
log_freq = 1
[checkpoint]
enable = false
[activation_checkpoint]
mode = "none"
"""


class Job(NamedTuple):
    """A model of TorchTitan's on some ranks, which shard its parameters where `settings` do not say otherwise. It is compiled
    if it has a `backend`. `at_random`: under plans made at random in place of those for budgets.
    """

    model: str
    ranks: int = 1
    settings: tuple[str, ...] = ()
    flavor: str = "debugmodel"
    batch: int = 4
    backend: str = ""
    at_random: bool = False

    @property
    def arguments(self) -> list[str]:
        """TorchTitan's."""
        compiled = ("compile.enable", f"compile.backend {self.backend}") if self.backend else ()
        return [word for setting in (*self.settings, *compiled) for word in f"--{setting}".split()]

    def describe(self) -> str:
        """In a few words."""
        said = [setting.rpartition(".")[2].replace("_degree", "").replace("_", " ") for setting in self.settings]
        kind = self.flavor.removeprefix("debugmodel").lstrip("_")
        return ", ".join([f"{self.model} {kind}".strip(), *said, *[self.backend] * bool(self.backend)])


_TP = ("parallelism.tensor_parallel_degree 2",)
_PP = ("parallelism.pipeline_parallel_degree 2",)
_EP = ("parallelism.expert_parallel_degree 2",)
_HSDP = ("parallelism.data_parallel_replicate_degree 2",)
_DDP = (*_HSDP, "parallelism.data_parallel_shard_degree 1")
JOBS = (
    Job("llama3"),
    Job("qwen3"),
    Job("qwen3", flavor="debugmodel_moe"),
    Job("deepseek_v3"),
    Job("llama4"),
    Job("llama3", 2),
    Job("llama3", 2, ("training.global_batch_size 16",)),
    Job("llama3", 2, _DDP),
    Job("llama3", 2, _TP),
    Job("llama3", 2, _PP),
    Job("llama3", 2, (*_PP, "parallelism.pipeline_parallel_schedule Interleaved1F1B")),
    Job("llama3", 2, (*_PP, "parallelism.pipeline_parallel_schedule InterleavedZeroBubble"), at_random=True),
    Job("llama3", 2, (*_PP, "parallelism.pipeline_parallel_schedule ZBVZeroBubble"), at_random=True),
    Job("llama3", 4, _TP),
    Job("llama3", 4, _HSDP, batch=2),
    Job("llama3", 4, (*_TP, *_PP)),
    Job("deepseek_v3", 2),
    Job("deepseek_v3", 2, _EP),
    Job("deepseek_v3", 2, _PP),
    Job("deepseek_v3", 4, (*_TP, *_EP), batch=2),
    Job("llama4", 2),
    Job("llama4", 2, _TP),
    Job("llama4", 2, _EP),
)
COMPILED = (
    Job("llama3", backend="aot_eager"),
    Job("llama3", backend="inductor"),
    Job("qwen3", backend="inductor"),
    Job("qwen3", flavor="debugmodel_moe", backend="aot_eager"),
    Job("qwen3", flavor="debugmodel_moe", backend="inductor"),
    Job("deepseek_v3", backend="aot_eager"),
    Job("deepseek_v3", backend="inductor"),
    Job("llama4", backend="inductor"),
    Job("llama3", 2, backend="inductor"),
    Job("llama3", 2, ("training.global_batch_size 16",), backend="inductor"),
    Job("llama3", 2, _DDP, backend="inductor"),
    Job("llama3", 2, _TP, backend="inductor"),
    Job("deepseek_v3", 2, backend="inductor"),
    Job("deepseek_v3", 2, _EP, backend="inductor"),
)


def train(job: Path, ranks: int, arguments: list[str]) -> list[dict[str, Any]] | None:
    """The reports of all ranks (`rank`); None if one fails or they take too long. Their output is beside the job."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = str(free.getsockname()[1])
    common = {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks), "GROUP_RANK": "0"}
    common |= {"MASTER_ADDR": "localhost", "MASTER_PORT": port, "OMP_NUM_THREADS": "1"}
    common["PYTHONPATH"] = os.pathsep.join(filter(None, (str(_ROOT), os.environ.get("PYTHONPATH", ""))))
    command = [sys.executable, "-m", "benchmarks.titan_training.rank", str(job), *arguments]
    processes = []
    for rank in range(ranks):
        environment = {**os.environ, **common, "RANK": str(rank), "LOCAL_RANK": str(rank)}
        with (job.parent / f"rank-{rank}.log").open("w") as log:
            processes.append(subprocess.Popen(command, env=environment, cwd=_ROOT, stdout=log, stderr=log))
    try:
        codes = [process.wait(_PATIENCE_S) for process in processes]
    except subprocess.TimeoutExpired:
        codes = [1]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    if any(codes):
        return None
    return [json.loads((job.parent / f"trained-{rank}.json").read_text()) for rank in range(ranks)]
