"""The H100 study: configurations, models, the training step on the CPU, its simulation, and the report."""

from __future__ import annotations

import csv
import functools
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

import autosac
from autosac.errors import UsageError
from autosac.trace import Label
from benchmarks.h100_study import __main__ as cli
from benchmarks.h100_study import models, study, vision
from benchmarks.h100_study.configs import (
    CONFIGS_FILE,
    MEASURED_FILE,
    Measured,
    StudyConfig,
    read_configs,
    read_measured,
)
from benchmarks.h100_study.models import FAMILIES, family
from benchmarks.h100_study.step import make_step

CPU = torch.device("cpu")
CONFIG_COLUMNS = study.COLUMNS[:6]

TINY = StudyConfig(
    model="timm_vit", batch_size=2, seq_len=-1, image_size=28, precision="FP", activation_checkpointing=False
)


def tiny_vit() -> vision.VisionTransformer:
    """Two blocks of 32 channels over four patches."""
    return vision.VisionTransformer(image_size=28, patch_size=14, dim=32, depth=2, num_heads=2, num_classes=1000)


def tiny_convnext() -> vision.ConvNeXt:
    """One block in each stage."""
    return vision.ConvNeXt(depths=(1, 1, 1, 1), dims=(8, 16, 32, 64), num_classes=1000)


TINY_VIT = replace(FAMILIES["timm_vit"], build=tiny_vit)


def write(path: Path, columns: tuple[str, ...], *rows: tuple[object, ...]) -> None:
    """A CSV file."""
    with path.open("w", newline="") as file:
        csv.writer(file).writerows([columns, *rows])


# ---- files ------------------------------------------------------------------------------------------------------------


def test_configurations_and_measurements_are_matched_by_configuration(tmp_path: Path) -> None:
    """A measured row belongs to the configuration with the same first six columns; others have none."""
    write(
        tmp_path / CONFIGS_FILE,
        CONFIG_COLUMNS,
        ("hf_GPT2", 16, 1024, -1, "HP", False),
        ("hf_clip", 64, 20, 336, "MP", True),
    )
    write(
        tmp_path / MEASURED_FILE,
        (*CONFIG_COLUMNS, "step_ms_measured", "active_bytes_peak_measured", "reserved_bytes_peak_measured"),
        ("hf_GPT2", 16, 1024, -1, "HP", False, 344.7, 1000, 1100),
    )
    gpt2, clip = read_configs(tmp_path)
    measured = read_measured(tmp_path)
    assert gpt2.describe() == "hf_GPT2 16x1024 HP"
    assert clip.describe() == "hf_clip 64x20x336px MP AC"
    assert (measured[gpt2].step_ms, measured[gpt2].active_bytes, measured[gpt2].reserved_bytes) == (344.7, 1000, 1100)
    assert clip not in measured


def test_without_measurements_there_are_none(tmp_path: Path) -> None:
    """The measured file may be missing, the list of configurations may not."""
    assert read_measured(tmp_path) == {}
    with pytest.raises(UsageError, match="cannot read"):
        read_configs(tmp_path)


@pytest.mark.parametrize(
    "row",
    [
        ("hf_GPT2", 0, 1024, -1, "HP", "False"),
        ("hf_GPT2", 16, 1024, -1, "BF", "False"),
        ("hf_GPT2", 16, -1, -1, "HP", "False"),
        ("hf_GPT2", 16, 1024, -1, "HP", "maybe"),
        ("hf_GPT2", "many", 1024, -1, "HP", "False"),
    ],
)
def test_a_wrong_row_is_a_usage_error(tmp_path: Path, row: tuple[object, ...]) -> None:
    """Zero batches, unknown precisions, no size at all, and values that cannot be read are refused."""
    write(tmp_path / CONFIGS_FILE, CONFIG_COLUMNS, row)
    with pytest.raises(UsageError):
        read_configs(tmp_path)


# ---- models -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "parameters", "checkpointed"),
    [
        ("timm_vit", 632_047_080, 32),
        ("timm_convnext_v2", 660_289_640, 36),
        ("hf_T5", 737_668_096, 48 + 122),
        ("hf_GPT2", 774_030_080, 36),
        ("llama_v3_1b", 1_235_814_400, 16 + 33),
        ("gemma_2b", 2_506_172_416, 18 + 37),
        ("hf_clip", 427_944_193 + 1, 12 + 24),
    ],
)
def test_models_have_the_published_sizes(name: str, parameters: int, checkpointed: int) -> None:
    """Parameters are those of the published models (CLIP: and the temperature); so is the number of checkpointed modules."""
    if not name.startswith("timm"):
        pytest.importorskip("transformers")
    with torch.device("meta"):
        model = family(name).build()
    assert sum(p.numel() for p in model.parameters()) == parameters
    assert sum(type(m).__name__ in family(name).checkpointed for m in model.modules()) == checkpointed


def test_an_unknown_model_is_a_usage_error() -> None:
    """The message lists the models that there are."""
    with pytest.raises(UsageError, match="timm_vit"):
        family("resnet50")


def test_global_response_norm_is_that_of_the_paper() -> None:
    """With weight 1 and bias 0: x + x * norm / mean of norms over channels (ConvNeXt V2, algorithm 1)."""
    norm = vision.GlobalResponseNorm(2)
    nn.init.ones_(norm.weight)
    x = torch.tensor([[[[3.0, 1.0], [4.0, 0.0]]]])  # channel norms 5 and 1, their mean 3
    expected = x + x * torch.tensor([5.0, 1.0]) / (3.0 + 1e-6)
    torch.testing.assert_close(norm(x), expected)


# ---- the training step ------------------------------------------------------------------------------------------------


def transformers_family(name: str) -> models.Family:
    """A family of the study with a tiny model."""
    transformers = pytest.importorskip("transformers")
    tiny = {"vocab_size": 1000, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16}
    build = {
        "hf_GPT2": lambda: transformers.GPT2LMHeadModel(transformers.GPT2Config(1000, 64, 32, 2, 2)),
        "hf_T5": lambda: transformers.T5ForConditionalGeneration(
            transformers.T5Config(1000, 32, 16, 64, 2, num_heads=2, decoder_start_token_id=0)
        ),
        "llama_v3_1b": lambda: transformers.LlamaForCausalLM(transformers.LlamaConfig(**tiny, **heads)),
        "gemma_2b": lambda: transformers.GemmaForCausalLM(
            transformers.GemmaConfig(**tiny, **heads, hidden_activation="gelu_pytorch_tanh")
        ),
        "hf_clip": lambda: models.ContrastiveClip(tiny_clip(transformers)),
    }[name]
    chosen = replace(FAMILIES[name], build=build)
    if name == "hf_clip":
        return chosen
    return replace(chosen, batch=functools.partial(models.token_batch, vocab_size=1000))


def tiny_clip(transformers: object) -> nn.Module:
    """CLIP with two layers of 32 channels on each side."""
    tower = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    return transformers.CLIPModel(  # type: ignore[attr-defined]
        transformers.CLIPConfig(  # type: ignore[attr-defined]
            text_config=tower, vision_config={**tower, "image_size": 28, "patch_size": 14}, projection_dim=16
        )
    )


@pytest.mark.parametrize("precision", ["FP", "HP", "MP"])
@pytest.mark.parametrize("name", sorted(FAMILIES))
def test_a_step_trains_in_every_precision(name: str, precision: str) -> None:
    """Tiny models of every family: the loss is finite, the optimizer moves every trained parameter, dtypes are as said."""
    build = {"timm_vit": tiny_vit, "timm_convnext_v2": tiny_convnext}.get(name)
    chosen = replace(FAMILIES[name], build=build) if build else transformers_family(name)
    image_size = {"timm_vit": 28, "timm_convnext_v2": 64, "hf_clip": 28}.get(name, -1)
    config = StudyConfig(
        model=name,
        batch_size=2,
        seq_len=8 if name.startswith("hf") or image_size < 0 else -1,
        image_size=image_size,
        precision=precision,  # type: ignore[arg-type]
        activation_checkpointing=True,
    )
    torch.manual_seed(0)
    model, step = make_step(config, CPU, model_family=chosen)
    before = [p.detach().clone() for p in model.parameters()]
    loss = step()
    assert torch.isfinite(loss)
    assert {p.dtype for p in model.parameters()} == {torch.float16 if precision == "HP" else torch.float32}
    moved = [not torch.equal(p, old) for p, old in zip(model.parameters(), before, strict=True)]
    assert sum(moved) >= 0.9 * len(
        moved
    )  # float16 swallows some of the small updates; CLIP's own temperature is unused
    assert all(p.grad is None for p in model.parameters())
    assert torch.get_default_dtype() is torch.float32


def test_checkpointing_changes_no_gradient() -> None:
    """The same seed gives the same parameters after two steps, with blocks recomputed or not."""
    after = []
    for checkpointing in (False, True):
        torch.manual_seed(0)
        config = replace(TINY, activation_checkpointing=checkpointing)
        model, step = make_step(config, CPU, model_family=TINY_VIT)
        step()
        step()
        after.append([p.detach() for p in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*after, strict=True))


def test_the_simulated_step_keeps_parameters_and_two_moments() -> None:
    """On the simulated GPU a step begins with the parameters and Adam's two moments of each, and nothing else."""
    simulation = autosac.simulate(functools.partial(make_step, TINY, model_family=TINY_VIT))
    trace = simulation.trace
    parameter_bytes = sum(4 * p.numel() for p in tiny_vit().parameters())
    resident = [trace.storages[i] for i in trace.residents()]
    by_label = {label: sum(s.nbytes for s in resident if s.label is label) for label in Label}
    assert by_label[Label.PARAMETER] == parameter_bytes
    assert by_label[Label.OPTIMIZER_STATE] == 2 * parameter_bytes
    assert sum(by_label.values()) == 3 * parameter_bytes


def test_checkpointing_lowers_the_simulated_peak() -> None:
    """Blocks that are recomputed hold less at the peak than blocks that are kept."""
    wide = replace(TINY, batch_size=64)
    peaks = [
        autosac.simulate(
            functools.partial(make_step, replace(wide, activation_checkpointing=on), model_family=TINY_VIT)
        ).peak_active_bytes
        for on in (False, True)
    ]
    assert peaks[1] < peaks[0]


# ---- the report -------------------------------------------------------------------------------------------------------


def result(measured: Measured | None) -> study.Result:
    """A result of round numbers."""
    return study.Result(
        config=TINY,
        active_bytes=1010,
        reserved_bytes=1900,
        step_ms=11.0,
        verdict="fits",
        seconds=1.234,
        measured=measured,
    )


def test_errors_are_relative_to_the_measurement() -> None:
    """Active 1 % above, reserved 5 % below, step time 10 % above; no measurement, no errors."""
    row = {"model": "timm_vit", "n_runs": "3"}
    known = result(Measured(step_ms=10.0, active_bytes=1000, reserved_bytes=2000, row=row))
    assert known.errors() == pytest.approx((0.01, -0.05, 0.1))
    assert result(None).errors() is None
    assert "1.000% (  1.00%)" in study.summary([known, result(None)])
    assert study.summary([result(None)]) == "none of these configurations has measured figures"


def test_csv_has_the_measured_columns_and_the_simulated_ones(tmp_path: Path) -> None:
    """Unmeasured rows leave the measured columns empty."""
    study.write_csv(tmp_path / "out.csv", [result(None)])
    with (tmp_path / "out.csv").open(newline="") as file:
        (row,) = csv.DictReader(file)
    assert tuple(row) == study.COLUMNS
    assert row["model"] == "timm_vit" and row["activation_checkpointing"] == "False"
    assert row["active_bytes_peak_measured"] == ""
    assert (row["active_bytes_sim"], row["reserved_bytes_sim"]) == ("1010", "1900")
    assert (row["step_ms_sim"], row["simulate_seconds"]) == ("11.0", "1.23")


def test_the_command_lists_and_refuses(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """--list prints numbered configurations; an unknown number or model ends with exit code 2 and one line."""
    write(tmp_path / CONFIGS_FILE, CONFIG_COLUMNS, ("timm_vit", 64, -1, 224, "HP", False))
    command = ["h100_study", "--truth", str(tmp_path)]
    monkeypatch.setattr("sys.argv", [*command, "--list"])
    assert cli.main() == 0
    assert capsys.readouterr().out == "  0  timm_vit 64x224px HP\n"
    for wrong in (["--config", "1"], ["--model", "resnet50"]):
        monkeypatch.setattr("sys.argv", [*command, *wrong])
        assert cli.main() == 2
        assert capsys.readouterr().err.startswith(f"error: {wrong[0]} {wrong[1]}: the study has")
