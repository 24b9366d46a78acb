"""What TorchTitan did when the published runs were made, where it differs from the version that is installed.

Most published runs are older than TorchTitan 0.2.2. Its model, tensor parallelism, checkpointing and trainer are used as
they are, and an era says what is put back to the way it was, read off TorchTitan's history:

- **FSDP**: embedding, final norm and output were parameters of the root group, which never reshards after the forward;
  the last block did not either, unless ``reshard_after_forward`` was "always". (2025-07 gave them groups of their own.)
- **Reduce-scatter**: FSDP2 of torch 2.4's time took its input in the reduce-scatter stream, whose pool then keeps a buffer
  as large as the root group's gradients in fp32; since then it comes from the compute stream's pool, where the logits were.
- **Attention**: keys and values were repeated to all heads, and ``F.scaled_dot_product_attention`` took flash first.
- **RMSNorm**: a Triton kernel (2024-04), TorchTitan's own in fp32 operators (to 2025-03), then ``nn.RMSNorm``, which before
  torch 2.9 was a composite in fp32 that casts its result after the weight. The Triton kernel keeps what the native
  one of today keeps (its input and the reciprocal norm), so the native one stands for it.
- **Loss**: in 2024 the model cast the logits to fp32, and the training loop's ``pred`` kept them until the next one.
- **Checkpointing**: ``early_stop`` and no RNG state, as torch's and TorchTitan's defaults were.
- **Optimizer**: the foreach form was the default until 2025-02.
- **Allocator**: the launcher set expandable segments from 2024-07 on.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class Era:
    """The defaults of a time; see the module's docstring. `model` is the name of the train spec that has them."""

    name: str
    norm: Literal["native", "own", "composite"]
    repeats_kv: bool = True
    root_group: bool = True
    keeps_logits: bool = False
    reduces_in_stream: bool = False
    optimizer: str = "fused"
    early_stop: bool = True
    preserve_rng_state: bool = False
    allocator: str = "expandable_segments:True"

    @property
    def model(self) -> str:
        """The train spec's name."""
        return "llama3" if self is NOW else "llama3_" + self.name.replace("-", "_")

    def overrides(self) -> tuple[str, ...]:
        """TorchTitan's arguments."""
        if self is NOW:
            return ("--model.name", self.model)
        return (
            *("--job.custom_config_module", "benchmarks.torchtitan_published.specs"),
            *("--model.name", self.model),
            *("--optimizer.implementation", self.optimizer),
            "--activation_checkpoint." + ("early_stop" if self.early_stop else "no-early_stop"),
            "--activation_checkpoint." + ("preserve_rng_state" if self.preserve_rng_state else "no-preserve_rng_state"),
        )


SPRING_2024 = Era(
    name="2024-04", norm="native", keeps_logits=True, reduces_in_stream=True, optimizer="foreach", allocator=""
)
SUMMER_2024 = Era(
    name="2024-06", norm="own", keeps_logits=True, reduces_in_stream=True, optimizer="foreach", allocator=""
)
WINTER_2025 = Era(name="2025-01", norm="own", optimizer="foreach")
FEBRUARY_2025 = Era(name="2025-02", norm="own")
SPRING_2025 = Era(name="2025-03", norm="composite")
NOW = Era(name="0.2.2", norm="native", repeats_kv=False, root_group=False, early_stop=False, preserve_rng_state=True)

ERAS = (SPRING_2024, SUMMER_2024, WINTER_2025, FEBRUARY_2025, SPRING_2025, NOW)


def era_of(date: str, notes: str = "") -> Era:
    """The era of a run made in the month `date` ("2025-03"); `notes` decide where a month saw both."""
    if date < "2024-06":
        return SPRING_2024
    if date < "2024-12":
        return SUMMER_2024
    if date < "2025-02" or "reshard_after_forward=" in notes:
        return WINTER_2025  # the commit with the reshard option precedes the fused optimizer's becoming the default
    if date < "2025-04":
        return SPRING_2025 if "nn.RMSNorm" in notes else FEBRUARY_2025
    if date < "2025-08":
        return SPRING_2025
    return NOW
