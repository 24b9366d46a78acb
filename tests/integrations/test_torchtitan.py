"""The TorchTitan plugin, on TorchTitan's own models: in this process, and on two gloo ranks."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn

from autosac.errors import UsageError
from autosac.integrations.apply import apply
from autosac.integrations.torchtitan.hook import OwnCheckpointing, parallelize_as


@pytest.fixture(scope="module")
def titan() -> ModuleType:
    """The program beside this file, as a module."""
    spec = importlib.util.spec_from_file_location("titan_rank", Path(__file__).with_name("titan.py"))
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_llama_debug_model_obeys_a_plan_file(titan: ModuleType, lab: Any, tmp_path: Path) -> None:
    """One process: bitwise gradients, the planned operators run again, no fallback."""
    report = titan.compare(lab, titan.dims(), tmp_path, 0)
    assert report["same"] and report["recomputed_as_planned"] and not report["fallbacks"]
    assert report["gradients"] == 21 and report["kept"] > 10
    assert report["classes"] == ["TransformerBlock"] * 4


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What two gloo ranks report, forked from a process of their own."""
    folder = tmp_path_factory.mktemp("ranks")
    program = [sys.executable, str(Path(__file__).with_name("titan.py")), "2", str(folder)]
    done = subprocess.run(program, capture_output=True, text=True, check=False, timeout=1200)
    assert done.returncode == 0, done.stdout + done.stderr
    return [json.loads((folder / f"report-{rank}.json").read_text()) for rank in range(2)]


@pytest.mark.parametrize("backend", ["aot_eager_decomp_partition", "interpreted_inductor"])
def test_compiled_layers_save_what_their_policies_keep_on_two_gloo_ranks(
    reports: list[dict[str, Any]], backend: str
) -> None:
    """FSDP2 and `compile.enable`: the first layer saves its products, the second none; gradients as without checkpointing,
    within rounding.
    """
    needed = 32 * (4 * 64 + 2 * 256) * 2  # of 32 tokens in bfloat16, all products but the last, which is only added
    for report in (rank[backend] for rank in reports):
        assert report["close"] and report["products"] == 7
        assert report["saved"][0] - report["saved"][1] == needed


def test_two_gloo_ranks_under_fsdp_and_tensor_parallelism(reports: list[dict[str, Any]]) -> None:
    """FSDP2 and TP on two real ranks: bitwise gradients on each; plans exchanged, failures and differences
    told.
    """
    for report in reports:
        for parallelism in ("fsdp", "tp", "fsdp offloads", "tp offloads"):
            assert report[parallelism]["same"] and report[parallelism]["recomputed_as_planned"]
            assert not report[parallelism]["fallbacks"]
        offloaded = [set(report[name]["offloaded"]) for name in ("fsdp", "tp", "fsdp offloads", "tp offloads")]
        assert offloaded == [set(), set(), {"Tensor"}, {"Tensor"}], "of DTensors what is inside of them"
        assert report["fsdp"]["classes"][0] == "FSDPTransformerBlock", "FSDP is applied to the planned module"
        assert report["nested"] == {"same": True, "fsdp_operators": [], "fallbacks": []}
        assert report["switched"]["same"] and report["switched"]["again"] == [
            [True, False],
            [False, True],
            [False, True],
        ]
    assert [report["switched"]["gathered"] for report in reports] == [["0", "1"], []]
    first, second = (report["exchange"] for report in reports)
    assert first["hash"] == second["hash"]
    assert (first["failure"], second["failure"]) == (
        "PlanError: no such thing",
        "PlanError: rank 0 could not plan: no such thing",
    )
    assert first["differing"] == "" and "give all ranks the same file" in second["differing"]


def small_arguments(spec: Any, config: Any) -> Any:
    """The arguments of the spec's debug model."""
    name = next(name for name in spec.model_args if "debug" in name)
    config.model.flavor = name
    arguments = spec.model_args[name]
    arguments.update_from_config(config)
    return arguments


@pytest.mark.parametrize("name", ["llama3", "llama4", "deepseek_v3", "qwen3", "gpt_oss", "flux"])
def test_the_transform_replaces_checkpointing_in_every_model(titan: ModuleType, name: str) -> None:
    """TorchTitan's models each call the transform once with the whole model, whatever the job's mode, which
    is restored.
    """
    if name == "flux" and importlib.util.find_spec("torchvision") is None:
        pytest.skip("flux needs torchvision")
    import torchtitan.protocols.train_spec as registry

    from autosac.integrations.torchtitan import transform

    config = titan.configure("--activation_checkpoint.mode", "none")
    spec = registry.get_train_spec(name)
    with torch.device("meta"):
        model = spec.model_cls(small_arguments(spec, config))
    seen: list[nn.Module] = []
    before = dict(model.named_modules())
    with transform(seen.append):
        parallelized = registry.get_train_spec(name).parallelize_fn(model, titan.dims(), config)
    assert len(seen) == 1 and seen[0] is model is parallelized
    assert dict(model.named_modules()).keys() == before.keys()
    assert config.activation_checkpoint.mode == "none"


def test_a_plan_that_is_torchtitans_own_checkpointing(titan: ModuleType, lab: Any, tmp_path: Path) -> None:
    """TorchTitan's code checkpoints its layers, as the plan says and not as the job's section; gradients are bitwise those
    without checkpointing. A plan for another model, and one of which TorchTitan checkpoints nothing, are refused.
    """
    reference = titan.bare(titan.dims())
    plan = lab.plan_for(reference, {}, job_checkpointing="full", early_stop=True)
    path = tmp_path / "own.json"
    plan.save(path)
    config = titan.configure("--autosac.enable", "--autosac.plan", str(path), "--activation_checkpoint.mode", "none")
    model = titan.build(config, titan.dims())
    layer = model.layers["0"]
    assert type(layer).__name__ == "CheckpointWrapper" and layer.checkpoint_fn.keywords["early_stop"]
    assert lab.same(titan.step(model), titan.step(reference))
    assert (config.activation_checkpoint.mode, config.activation_checkpoint.early_stop) == ("none", False)
    with pytest.raises(UsageError, match="only a TorchTitan job can follow it"):
        apply(titan.bare(titan.dims()), plan)

    del reference.layers["1"]
    lab.plan_for(reference, {}, job_checkpointing="full").save(path)
    with pytest.raises(UsageError, match=r"the model has a parameter layers\.1"):
        titan.build(titan.configure("--autosac.enable", "--autosac.plan", str(path)), titan.dims())
    own = OwnCheckpointing(check=lambda _: None, values={"mode": "full"})
    with pytest.raises(UsageError, match="did not apply activation checkpointing"):
        parallelize_as(lambda model, *_: model, own, nn.Linear(1, 1), None, config)
    assert config.activation_checkpoint.mode == "none"


@pytest.mark.parametrize("layers", [0, 1])
def test_a_model_part_without_layers_has_nothing_to_checkpoint(titan: ModuleType, layers: int) -> None:
    """A pipeline stage with the output alone is left as it is under TorchTitan's own checkpointing; one with layers is not."""
    part = nn.Module()
    part.layers = nn.ModuleDict({str(i): nn.Linear(1, 1) for i in range(layers)})
    own = OwnCheckpointing(check=lambda _: None, values={"mode": "full"})
    refused = pytest.raises(UsageError, match="did not apply") if layers else contextlib.nullcontext()
    with refused:
        assert parallelize_as(lambda model, *_: model, own, part, None, titan.configure()) is part


def test_without_the_section_torchtitan_checkpoints_as_ever(titan: ModuleType) -> None:
    """Full checkpointing by TorchTitan wraps its layers when AutoSAC is not enabled, or when told to stay
    out.
    """
    from autosac.integrations.torchtitan import transform

    model = titan.build(titan.configure("--activation_checkpoint.mode", "full"), titan.dims())
    assert type(model.layers["0"]).__name__ == "CheckpointWrapper"
    with transform(None):
        config = titan.configure(
            "--activation_checkpoint.mode", "none", "--autosac.enable", "--autosac.plan", "no.json"
        )
        assert type(titan.build(config, titan.dims()).layers["0"]).__name__ == "TransformerBlock"


def test_the_plan_says_in_how_many_chunks_the_loss_is_computed(titan: ModuleType, lab: Any, tmp_path: Path) -> None:
    """TorchTitan's loss is wrapped where the plan has chunks, and is its own where it has none or the section is off."""
    import torchtitan.protocols.train_spec as registry
    from torchtitan.components.loss import cross_entropy_loss

    from autosac.integrations.chunked_loss import ChunkedLoss

    def built(chunks: int, *arguments: str) -> Any:
        path = tmp_path / f"{chunks}.json"
        lab.plan_for(titan.bare(titan.dims()), {}, loss_chunks=chunks).save(path)
        config = titan.configure("--autosac.plan", str(path), *arguments)
        return registry.get_train_spec("llama3").build_loss_fn(config, parallel_dims=titan.dims())

    loss = built(3, "--autosac.enable")
    assert isinstance(loss, ChunkedLoss) and (loss.chunks, loss.loss_fn) == (3, cross_entropy_loss)
    assert built(1, "--autosac.enable") is built(3) is cross_entropy_loss


def test_wrong_sections_stop_the_job_before_its_first_step(titan: ModuleType, lab: Any, tmp_path: Path) -> None:
    """A plan and a budget; a missing file; a plan for more ranks; one for another depth: each says what."""
    reference = titan.bare(titan.dims())
    path = tmp_path / "plan.json"

    def error(*arguments: str) -> str:
        with pytest.raises(UsageError) as caught:
            titan.build(titan.configure("--autosac.enable", *arguments), titan.dims())
        return str(caught.value)

    assert "both a plan and a budget" in error("--autosac.plan", "p.json", "--autosac.budget", "60GiB")
    assert "cannot read the plan" in error("--autosac.plan", str(path))
    lab.plan_for(reference, {}, world_size=16).save(path)
    assert error("--autosac.plan", str(path)) == "the plan was made for 16 ranks; this job has 1"
    del reference.layers["1"]
    lab.plan_for(reference, {}).save(path)
    assert "the model has a parameter layers.1.attention.wq.weight, the plan's model does not" in error(
        "--autosac.plan", str(path)
    )
    path.write_text("{")
    assert "is not an AutoSAC plan" in error("--autosac.plan", str(path))


def test_a_model_without_checkpointing_is_refused(titan: ModuleType) -> None:
    """A parallelize function with no `apply_ac` cannot be given a plan, and says so."""
    from autosac.integrations.torchtitan.hook import parallelize_transformed

    def parallelize_plain(model: nn.Module, parallel_dims: Any, job_config: Any) -> nn.Module:
        return model

    with pytest.raises(UsageError, match="parallelize_plain applies no activation checkpointing"):
        parallelize_transformed(parallelize_plain, lambda _: None, nn.Linear(1, 1), None, titan.configure())


def test_overrides_are_the_command_line_without_the_job_file() -> None:
    """Both spellings of the file's option go, everything else stays in order."""
    from autosac.integrations.torchtitan.plugin import job_arguments

    line = [
        "--job.config_file",
        "a.toml",
        "--training.steps",
        "5",
        "--job.config-file=b.toml",
        "--compile.enable",
    ]
    assert job_arguments(line) == ["--training.steps", "5", "--compile.enable"]


def test_the_section_is_merged_into_torchtitans_configuration(titan: ModuleType, tmp_path: Path) -> None:
    """A job file with an [autosac] section, and command-line overrides of it, arrive typed."""
    from torchtitan.config import ConfigManager

    path = tmp_path / "job.toml"
    path.write_text(
        '[job]\ncustom_config_module = "autosac.integrations.torchtitan.job_config"\n'
        '[model]\nname = "llama3"\nflavor = "debugmodel"\n'
        '[autosac]\nenable = true\nbudget = "68GiB"\nsolver = "ilp"\ncurve = "pwlf"\n'
    )
    config = ConfigManager().parse_args(["--job.config_file", str(path), "--autosac.solver", "greedy"])
    section = config.autosac
    assert section.curve == "pwlf"
    assert (section.enable, section.budget, section.solver, section.plan, section.gpu) == (
        True,
        "68GiB",
        "greedy",
        "",
        "",
    )


def test_a_spec_is_wrapped_once() -> None:
    """A job that registers the spec that it has got, under another name, gets that very spec back."""
    import torchtitan.protocols.train_spec as registry

    from autosac.integrations.torchtitan.plugin import install

    install()
    install()
    spec = registry.get_train_spec("llama3")
    registry.register_train_spec("llama3 once more", spec)
    assert registry.get_train_spec("llama3 once more") is spec
    assert registry.get_train_spec("llama3") is not spec
