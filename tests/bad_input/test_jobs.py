"""TorchTitan 0.2 jobs that cannot run are refused before anything is captured, by the name of the setting."""

from __future__ import annotations

from pathlib import Path

import pytest

from autosac.capture.process.store import default_store
from autosac.errors import UsageError
from autosac.jobs.checks import check_job_file
from autosac.limits import whole_from_environment, world_size_of_environment
from autosac.titan import source as titan_source
from autosac.titan.version import has_python_jobs

pytestmark = pytest.mark.skipif(has_python_jobs(), reason="TorchTitan 0.3 takes no job files")
MODEL = '[model]\nname = "llama3"\nflavor = "{flavor}"\n'


def refused(folder: Path, text: str, *overrides: str, world_size: int = 1) -> str:
    """The one line that the job is refused with."""
    path = folder / "job.toml"
    path.write_text(text)
    with pytest.raises(UsageError) as caught:
        check_job_file(str(path), overrides, world_size)
    message = str(caught.value).replace(str(path), "job.toml")
    assert "\n" not in message
    return message


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "job file job.toml is empty: it needs at least a section [model] with name and flavor"),
        ("# nothing\n", "job file job.toml is empty: it needs at least a section [model] with name and flavor"),
        ('training = "long"', "job file job.toml: training is 'long': expected a section [training]"),
        ('[training]\nseq_len = "long"', "job file job.toml: training.seq_len is 'long': expected a whole number"),
        ("[training]\nseq_len = 2048.0", "job file job.toml: training.seq_len is 2048.0: expected a whole number"),
        ("[training]\nsteps = true", "job file job.toml: training.steps is True: expected a whole number"),
        ('[training]\ndtype = "int3"', "job file job.toml: training.dtype is 'int3': expected 'bfloat16' or 'float32'"),
        ('[compile]\nenable = "maybe"', "job file job.toml: compile.enable is 'maybe': expected true or false"),
        ('[autosac]\nenable = "maybe"', "job file job.toml: autosac.enable is 'maybe': expected true or false"),
        ('[compile]\ncomponents = "model"', "job file job.toml: compile.components is 'model': expected a list"),
        ("[optimizer]\nlr = nan", "job file job.toml: optimizer.lr is nan: expected a number"),
        (
            "[training]\nlocal_batch_size = 0",
            "job file job.toml: training.local_batch_size is 0: expected a whole number from 1 to 1048576",
        ),
        (
            "[training.dataloader]\nnum_workers = []",
            "job file job.toml: training.dataloader.num_workers is []: expected a whole number",
        ),
    ],
)
def test_types_and_ranges(tmp_path: Path, text: str, message: str) -> None:
    """The file, the setting, its value and what is allowed."""
    assert refused(tmp_path, text) == message


def test_what_does_not_exist(tmp_path: Path) -> None:
    """Unknown sections and settings are refused with those that there are, unless the job brings settings of its own."""
    assert "there is no section [trainig]; it may have job, " in refused(tmp_path, "[trainig]\nseq_len = 1")
    assert "there is no setting training.seqlen; [training] has dataset, " in refused(
        tmp_path, "[training]\nseqlen = 1"
    )
    own = tmp_path / "own.toml"
    own.write_text('[job]\ncustom_config_module = "mine"\n[mine]\nx = 1\n[training]\nnew = 2\n')
    check_job_file(str(own), (), 1)


@pytest.mark.parametrize(
    ("flavor", "world_size", "overrides", "message"),
    [
        (
            "8B",
            16,
            ("tensor_parallel_degree=16",),
            "llama3 8B has 8 key and value heads, which can be divided by 1, 2, 4, 8",
        ),
        (
            "debugmodel",
            64,
            ("pipeline_parallel_degree=64",),
            "has 6 layers, enough for at most 8 ranks with 1 stage each",
        ),
        (
            "debugmodel",
            8,
            ("pipeline_parallel_degree=8", "pipeline_parallel_schedule=Interleaved1F1B"),
            "has 6 layers, enough for at most 4 ranks with 2 stages each",
        ),
        ("debugmodel", 8, ("tensor_parallel_degree=3",), "tensor_parallel 3 must divide the world of 8 GPUs"),
        (
            "debugmodel",
            8,
            ("data_parallel_shard_degree=3",),
            "the degrees (data_parallel_shard 3) multiply to 3, but the world has 8 GPUs",
        ),
        (
            "debugmodel",
            8,
            ("tensor_parallel_degree=0",),
            "parallelism.tensor_parallel_degree is '0': expected a whole number",
        ),
        (
            "debugmodel",
            8,
            ("expert_parallel_degree=2", "expert_tensor_parallel_degree=4"),
            "parallelism.expert_tensor_parallel_degree is '4': expected 1, or 1 as parallelism.tensor_parallel_degree is",
        ),
        (
            "debugmodel",
            2,
            ("pipeline_parallel_degree=2", "pipeline_parallel_microbatch_size=3"),
            "pipeline_parallel_microbatch_size is '3': expected a divisor of training.local_batch_size = 8",
        ),
    ],
)
def test_parallelism(tmp_path: Path, flavor: str, world_size: int, overrides: tuple[str, ...], message: str) -> None:
    """Degrees that the world, the model or the batch cannot be divided by."""
    given = [f"--parallelism.{override}" for override in overrides]
    assert message in refused(tmp_path, MODEL.format(flavor=flavor), *given, world_size=world_size)


def test_arguments_come_before_the_file(tmp_path: Path) -> None:
    """In either spelling, the last one counts; sequences and batches are divided as the degrees ask for."""
    text = MODEL.format(flavor="debugmodel") + "[training]\nseq_len = 2047\n"
    assert "training.seq_len is 2047: expected a multiple of 2" in refused(tmp_path, text)
    path = tmp_path / "job.toml"
    check_job_file(str(path), ("--training.seq-len", "5", "--training.seq_len=2048"), 1)
    said = refused(tmp_path, text, "--training.seq_len", "2048", "--training.global_batch_size=13", world_size=2)
    assert said.startswith("training.global_batch_size is '13': expected a multiple of training.local_batch_size")


def test_the_models_of_torchtitan_are_known() -> None:
    """What is read from the source of TorchTitan agrees with what it says when it is imported."""
    from torchtitan.protocols.train_spec import get_train_spec

    for name in ("llama3", "llama4", "deepseek_v3", "qwen3", "gpt_oss"):
        specification = get_train_spec(name)
        flavors = titan_source.flavors(name)
        assert flavors is None or set(flavors) == set(specification.model_args)
        assert titan_source.has_pipelines(name) == (specification.pipelining_fn is not None)
        for flavor, arguments in specification.model_args.items():
            facts = titan_source.model_facts(name, flavor)
            assert facts["n_layers"] == arguments.n_layers  # type: ignore[attr-defined]
            if "n_heads" in facts:
                assert facts["n_heads"] == arguments.n_heads  # type: ignore[attr-defined]
            if facts.get("n_kv_heads") is not None and hasattr(arguments, "n_kv_heads"):
                assert facts["n_kv_heads"] == (arguments.n_kv_heads or arguments.n_heads)  # type: ignore[attr-defined]
            experts = getattr(arguments, "moe_args", None) if getattr(arguments, "moe_enabled", True) else None
            known = (facts.get("n_experts"), facts.get("top_k"))
            assert known == ((experts.num_experts, experts.top_k) if experts is not None else (None, None))
    assert titan_source.flavors("llama3") is not None and titan_source.flavors("no_such_model") is None
    assert titan_source.has_pipelines("no_such_model")
    assert titan_source.model_facts("no_such_model", "8B") == titan_source.model_facts("../x", "8B") == {}


@pytest.mark.parametrize("text", ["²", "x", "", "0", "-1", "1.5", "1_0", "٣", "9" * 40])
def test_environment(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Variables that are no numbers are named, with what is allowed and what to do."""
    monkeypatch.setenv("NGPU", text)
    with pytest.raises(UsageError, match=r"the environment variable NGPU is .* from 1 to 131072; correct it or give"):
        world_size_of_environment()
    monkeypatch.setenv("RANK", "7")
    assert whole_from_environment("RANK", 0, 0, 7) == 7
    monkeypatch.delenv("NGPU")
    assert world_size_of_environment() == 1


def test_the_cache_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """AUTOSAC_CACHE is off, on, or the absolute path of a folder that can be written; a relative XDG_CACHE_HOME is ignored."""
    monkeypatch.setenv("AUTOSAC_CACHE", "off")
    assert default_store() is None
    monkeypatch.setenv("AUTOSAC_CACHE", str(tmp_path / "kept"))
    store = default_store()
    assert store is not None and (tmp_path / "kept" / "captures").is_dir()
    for wrong in ("relative/folder", "never"):
        monkeypatch.setenv("AUTOSAC_CACHE", wrong)
        with pytest.raises(UsageError, match="expected off, on, or the absolute path of a folder"):
            default_store()
    monkeypatch.setenv("AUTOSAC_CACHE", "/proc/x")
    with pytest.raises(UsageError, match="AUTOSAC_CACHE is '/proc/x': the folder /proc/x/captures cannot be written"):
        default_store()
