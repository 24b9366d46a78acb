"""Published steps of scripts: what is read from their files."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import autosac
from benchmarks.scripts.published import FOLDER, UNSEEN, of_its_time, published_run, read_published


def _attention_of(backend: SDPBackend) -> Callable[[torch.device], tuple[nn.Module, Callable[[], Any]]]:
    """A step of attention alone."""

    def make_step(device: torch.device) -> tuple[nn.Module, Callable[[], Any]]:
        def step() -> None:
            heads = torch.randn(1, 8, 4096, 64, dtype=torch.bfloat16, device=device, requires_grad=True)
            with sdpa_kernel(backend):
                nn.functional.scaled_dot_product_attention(heads, heads, heads, is_causal=True).sum().backward()

        return nn.Module(), step

    return make_step


def test_the_unseen_mpts_are_runs_of_the_script_with_their_pages_steps() -> None:
    """A row becomes the script's arguments, its nodes, and the time in which its GPU has seen its share of the tokens."""
    runs = {run.case: run for run in read_published(UNSEEN)}
    assert len(runs) == 16
    several, single = runs["M9"], runs["M11"]
    assert (several.request.nodes, several.request.nproc, several.request.gpu) == (16, 8, "h100-sxm-80gb")
    assert several.step_ms == 1e3 * 16 * 2048 / 5080
    sizes = "--batch 16 --length 2048 --layers 40 --width 5120 --accumulation 1 --attention triton --prefetch pre"
    assert several.request.arguments == (*sizes.split(), "--float32-reduction", "--checkpointing")
    assert (single.request.nodes, single.request.gpu) == (1, "a100-sxm-80gb")
    assert single.step_ms == 1e3 * 4 * 14 * 2048 / 20513
    assert "--checkpointing" not in single.request.arguments
    assert single.request.arguments[-4:] == ("--attention", "triton", "--prefetch", "post")


def test_rows_of_the_sweep_for_many_gpus_have_its_settings() -> None:
    """Of 128 GPUs and more: FlashAttention 2, gradients reduced in float32; parameters are kept if the row says so."""
    row = {"model": "MPT-125m", "hardware": "a100_40gb", "n_gpus": "256", "local_batch": "8", "global_batch": "2048"}
    row |= {
        "case_id": "X",
        "seq_len": "2048",
        "ac_mode": "none",
        "tokens_per_s_per_gpu": "1",
        "schedule": "SHARD_GRAD_OP",
    }
    (run,) = map(published_run, [row])
    assert (run.request.gpu, run.request.nodes) == ("a100-sxm-40gb", 32)
    assert "--head 64 --attention flash --prefetch pre --float32-reduction --keep-gathered" in " ".join(
        run.request.arguments
    )


def test_rows_of_llama_have_their_attention_kernel() -> None:
    """It is in the notes, which the file of the published runs has."""
    row = {"model": "Llama-3.2-1B (HF)", "hardware": "1xB200 clock locked 1665MHz", "n_gpus": "1", "step_time_s": "0.2"}
    row |= {"case_id": "X", "local_batch": "3", "seq_len": "4096", "notes": "SDPA backend=EFFICIENT_ATTENTION"}
    run = published_run(row)
    assert run.request.arguments == ("--batch", "3", "--length", "4096", "--backend", "EFFICIENT_ATTENTION")
    assert (run.request.gpu, run.step_ms) == ("b200-sxm-180gb", 200.0)
    assert run.locked_mhz == 1665


def test_the_pages_are_runs_of_the_scripts() -> None:
    """Six sizes, three kernels and two GPUs of Llama; 76 MPTs, those of ``unseen_mpt.csv`` among them with the same steps."""
    llama, mpt = (read_published(FOLDER / f"{page}_page.csv") for page in ("llama", "mpt"))
    assert len(llama) == 36 and len({(run.request.gpu, run.request.arguments) for run in llama}) == 36
    assert len(mpt) == 76
    steps = {(run.request.gpu, run.request.world_size, run.request.arguments): run.step_ms for run in mpt}
    for run in read_published(UNSEEN):
        assert steps[run.request.gpu, run.request.world_size, run.request.arguments] == run.step_ms


@pytest.mark.parametrize(
    ("gpu", "backend", "factor"),
    [
        ("b200-sxm-180gb", SDPBackend.CUDNN_ATTENTION, 1.96),
        ("b200-sxm-180gb", SDPBackend.FLASH_ATTENTION, 1.0),
        ("h200-sxm-141gb", SDPBackend.CUDNN_ATTENTION, 1.0),
    ],
)
def test_cudnn_of_its_time(gpu: str, backend: SDPBackend, factor: float) -> None:
    """Attention by cuDNN takes 1.96 times as long on a B200, and nothing else does."""
    today = autosac.simulate(_attention_of(backend), gpu=gpu)
    then = of_its_time(today)
    grown = then.pricing.event_ms - today.pricing.event_ms
    assert sum(grown > 0) == (2 if factor > 1 else 0)
    assert grown[grown > 0] == pytest.approx((factor - 1) * today.pricing.event_ms[grown > 0])
