"""What TorchTitan did when the published runs were made, where it differs from the version that is installed.

Most published runs are older than TorchTitan 0.2.2. Its model, tensor parallelism, checkpointing and trainer are used as
they are, and an era says what is put back to the way it was, read off TorchTitan's history:

- **FSDP**: embedding, final norm and output were parameters of the root group, which never reshards after the forward;
  the last block did not either, unless ``reshard_after_forward`` was "always". 2025-07-28 gave them groups of their own.
- **Reduce-scatter**: FSDP2 of torch 2.4's time took its input in the reduce-scatter stream, whose pool then keeps a buffer
  as large as the root group's gradients in fp32; since then it comes from the compute stream's pool, where the logits were.
- **Attention**: keys and values were repeated to all heads (until 2026-01-27), and ``F.scaled_dot_product_attention`` took
  flash first. On Blackwell cuDNN's came first since 2025-05-15 (TorchTitan's pull request 1196), on all GPUs since 2025-10-09
  (6a3a9da95). Selective checkpointing did not keep its results until 2025-12-01 (b39377f9f).
- **RMSNorm**: TorchTitan's own in fp32 operators (to 2025-03-19; in 2024-04 and 05 a Triton kernel), then ``nn.RMSNorm``,
  before torch 2.9 a composite in fp32 that casts its result after the weight. The Triton kernel keeps what the native one of
  today keeps (its input and the reciprocal norm), so the native one stands for it.
- **Compile**: the whole model, until 2024-05-21 (9954e19cc): FSDP's hooks split it into blocks, and what is before and after
  them is compiled, too. Each block for itself since.
- **Inductor**: it reorders loops to fuse more since 2025-09-22 (pytorch's pull request 162030); what builds on that is
  younger.
- **Loss**: until 2024-06-12 the training loop's ``pred``, cast to fp32 by the model, lived until the next step's. It was
  compiled with the model from 2024-10-22 to 2024-12-18 (e8977b007) and again from 2025-04-02 (bbb1b616e).
- **float8 under tensor parallelism**: float8 all-gathers of activations, until 2025-09-30 (8a2686c4a) renamed the converter
  to ``quantize.linear.float8`` while the test for it kept asking for ``float8``.
- **Pipelines**: as many microbatches as stages' ranks by default, until 2025-04-07 (5e2033c75).
- **Qwen3 under tensor parallelism**: the norms of q and k gathered all heads until 2025-10-14 (8c1d1c5fc).
- **Checkpointing**: ``early_stop`` and no RNG state, as torch's and TorchTitan's defaults were (to 2025-08-29).
- **float8, not compiled**: selective checkpointing kept the results of ``abs``, from which scales come, from 2024-11-26
  (bcebc0de5) to 2025-02-06 (88247277c). In compiled runs of that time memory shows that it kept none.
- **float8 casts, not compiled**: torchao cast input, weight and gradient once each until 2025-01-13, the weight until
  2025-07-24 (``float8.py``).
- **DeepSeek-V3**: ``F.scaled_dot_product_attention`` until 2025-08-22 (f738a03bf), without cuDNN's, flex attention since. The
  published row of that commit has its figures for the time before. Selective checkpointing keeps the results of all-to-all
  since 2025-09-06 (c4e229115).
- **Mixtures of experts**: the experts' outputs are scattered and added until 2025-11-21 (e1f7f318a, pull request 1974) and
  again since 2026-04-06 (8bc267dea). Between, as in 0.2.2, they are put in order and multiplied by the scores (`torch.bmm` in
  float32). Groups of rows are no longer padded since 2026-04-02 (fe80b63cf), and mixtures are compiled with their layers since
  2026-04-14 (5242bdf71).
- **Optimizer**: the foreach form was the default until 2025-02-24.
- **KempnerForge**: not TorchTitan, but a trainer of PyTorch's own parts with the same model (KempnerInstitute/KempnerForge,
  01b461a). Parameters in bf16, blocks and a root group in FSDP2, the whole model compiled, the loss in bf16 and not compiled;
  gradients of several microbatches are reduced with the last one; the vocabulary is gathered for the loss. Under tensor
  parallelism each of the five column-wise layers of a block gathers its input for itself.
- **Allocator**: TorchTitan's launcher sets expandable segments since 2024-10-22 (a5e57e4a9). Runs that were started otherwise
  have none (``runs.py`` names them).

The dates are those of TorchTitan's commits. The norms and root groups are Llama's only: Qwen3 and DeepSeek-V3 are younger.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

WIDE = "_wide_vocabulary"
"""The end of the names of DeepSeek-V3's flavors with the vocabulary of DeepSeek-V3's tokenizer, 129,280."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Era:
    """The defaults of a time; see the module's docstring. `model` names the train spec of a family that has them."""

    name: str
    norm: Literal["native", "own", "composite"]
    repeats_kv: bool = True
    root_group: bool = True
    keeps_logits: bool = False
    reduces_in_stream: bool = False
    compiles_loss: bool = True
    compiles_whole_model: bool = False
    float8_tensor_parallel: bool = True
    microbatch_per_rank: bool = False
    gathers_qk_norms: bool = True
    cudnn_first: Literal["never", "on Blackwell", "always"] = "never"
    keeps_cudnn_attention: bool = False
    deepseek_flex: bool = False
    keeps_all_to_all: bool = False
    scatters_experts: bool = False
    pads_experts: bool = True
    compiles_experts: bool = False
    keeps_abs: bool = False
    float8_casts: Literal["once", "weight once", "anew"] = "once"
    reorders_loops: bool = False
    widens_logits: bool = True
    parallel_loss: bool = True
    reduces_last_microbatch: bool = False
    gathers_for_each_layer: bool = False
    optimizer: str = "fused"
    early_stop: bool = True
    preserve_rng_state: bool = False
    allocator: str = "expandable_segments:True"

    def model(self, family: str = "llama3") -> str:
        """The name of the train spec; `family` is TorchTitan's name of it today."""
        return family if self is NOW else f"{family}_{self.name.replace('-', '_')}"

    def overrides(self, family: str = "llama3") -> tuple[str, ...]:
        """TorchTitan's arguments."""
        if self is NOW:
            return ("--model.name", self.model(family))
        return (
            *("--job.custom_config_module", "benchmarks.torchtitan_published.specs"),
            *("--model.name", self.model(family)),
            *("--optimizer.implementation", self.optimizer),
            "--activation_checkpoint." + ("early_stop" if self.early_stop else "no-early_stop"),
            "--activation_checkpoint." + ("preserve_rng_state" if self.preserve_rng_state else "no-preserve_rng_state"),
            *(() if self.parallel_loss else ("--parallelism.disable_loss_parallel",)),
        )


_2024 = Era(
    name="2024-08", norm="own", optimizer="foreach", compiles_loss=False, microbatch_per_rank=True, allocator=""
)
SUMMER_2024 = replace(_2024, name="2024-06", keeps_logits=True, reduces_in_stream=True)
SPRING_2024 = replace(SUMMER_2024, name="2024-04", norm="native", compiles_whole_model=True)
MARCH_2024 = replace(SPRING_2024, name="2024-03", norm="own")
AUTUMN_2024 = Era(name="2024-11", norm="own", optimizer="foreach", microbatch_per_rank=True)
WINTER_2025 = replace(AUTUMN_2024, name="2025-01", compiles_loss=False, keeps_abs=True)
FEBRUARY_2025 = replace(WINTER_2025, name="2025-02", optimizer="fused", keeps_abs=False, float8_casts="weight once")
MARCH_2025 = replace(FEBRUARY_2025, name="2025-03", norm="composite")
SPRING_2025 = replace(MARCH_2025, name="2025-04", compiles_loss=True, microbatch_per_rank=False)
JUNE_2025 = replace(SPRING_2025, name="2025-06", cudnn_first="on Blackwell")
SUMMER_2025 = Era(
    name="2025-08",
    norm="native",
    root_group=False,
    early_stop=False,
    cudnn_first="on Blackwell",
    scatters_experts=True,
    float8_casts="anew",
)
AUTUMN_2025 = replace(
    SUMMER_2025,
    name="2025-10",
    float8_tensor_parallel=False,
    cudnn_first="always",
    gathers_qk_norms=False,
    deepseek_flex=True,
    keeps_all_to_all=True,
    reorders_loops=True,
)
WINTER_2026 = replace(AUTUMN_2025, name="2025-12", scatters_experts=False)
NOW = replace(WINTER_2026, name="0.2.2", repeats_kv=False, preserve_rng_state=True, keeps_cudnn_attention=True)
SPRING_2026 = replace(NOW, name="2026-04", scatters_experts=True, pads_experts=False, compiles_experts=True)

FORGE = Era(
    name="forge",
    norm="composite",
    compiles_loss=False,
    compiles_whole_model=True,
    cudnn_first="always",
    preserve_rng_state=True,
    reorders_loops=True,
    widens_logits=False,
    parallel_loss=False,
    reduces_last_microbatch=True,
    gathers_for_each_layer=True,
    allocator="",
)

ERAS = (
    *(MARCH_2024, SPRING_2024, SUMMER_2024, _2024, AUTUMN_2024, WINTER_2025, FEBRUARY_2025, MARCH_2025, SPRING_2025),
    *(JUNE_2025, SUMMER_2025, AUTUMN_2025, WINTER_2026, NOW, SPRING_2026, FORGE),
)
_LAST_MONTHS = (
    *(("2024-03", MARCH_2024), ("2024-05", SPRING_2024), ("2024-06", SUMMER_2024), ("2024-10", _2024)),
    *(("2024-11", AUTUMN_2024), ("2025-01", WINTER_2025), ("2025-03", FEBRUARY_2025), ("2025-05", SPRING_2025)),
    *(("2025-07", JUNE_2025), ("2025-09", SUMMER_2025), ("2025-11", AUTUMN_2025)),
    *(("2026-01", WINTER_2026), ("2026-03", NOW)),
)


def era_of(date: str, notes: str = "") -> Era:
    """The era of a run made in the month `date` ("2025-03"); `notes` decide where a month saw both."""
    if "KempnerForge" in notes:
        return FORGE
    era = next((era for month, era in _LAST_MONTHS if date <= month), SPRING_2026)
    if era is FEBRUARY_2025 and "reshard_after_forward=" in notes:
        return WINTER_2025  # the commit with this option precedes the fused optimizer's becoming the default
    if era is FEBRUARY_2025 and "nn.RMSNorm" in notes:
        return MARCH_2025
    if era is SPRING_2024 and "non-fused RMSNorm" in notes:
        return MARCH_2024
    if era is SUMMER_2025 and "flex attention" in notes:
        return AUTUMN_2025
    if era is AUTUMN_2025 and "pull request 2080" in notes:
        return WINTER_2026  # opened after 2025-11-21
    return era
