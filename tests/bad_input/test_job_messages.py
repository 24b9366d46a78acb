"""What is said of 200 jobs for a TorchTitan of our own: of types, ranges, degrees, batches, pipelines; pinned in ``jobs.txt``.

``AUTOSAC_UPDATE_GOLDEN=1 pytest tests/bad_input/test_job_messages.py`` writes the file anew; look at what changed.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest
from pinned import check

from autosac.errors import UsageError
from autosac.jobs.checks import check_job_file, given_settings, read_setting
from autosac.titan import source as titan_source

CONFIG = """
@dataclass
class Model:
    name: str = "llama3"
    flavor: str = "debug"
    plan: str | Path | None = None
    odd: Path = Path()
@dataclass
class Loader:
    workers: int = 0
    share: float | None = None
    names: list[str] | None = None
@dataclass
class Training:
    local_batch_size: int = 8
    global_batch_size: int = -1
    seq_len: int = 2048
    enable_cpu_offload: bool = False
    steps: int | str = 10
    dtype: Literal["bfloat16", "float32"] = "float32"
    one: Literal["only"] = "only"
    loader: Loader = field(default_factory=Loader)
    made = 3
@dataclass
class Parallelism:
    data_parallel_replicate_degree: int = 1
    data_parallel_shard_degree: int = -1
    context_parallel_degree: int = 1
    tensor_parallel_degree: int = 1
    pipeline_parallel_degree: int = 1
    expert_parallel_degree: int = 1
    expert_tensor_parallel_degree: int = 1
    pipeline_parallel_schedule: str = "1F1B"
    pipeline_parallel_microbatch_size: int = 1
    pipeline_parallel_layers_per_stage: int | None = None
    pipeline_parallel_first_stage_less_layers: int = 1
    pipeline_parallel_last_stage_less_layers: int = 1
    module_fqns_per_model_part: list[list[str]] | None = None
@dataclass
class Job:
    custom_config_module: str = ""
@dataclass
class JobConfig:
    job: Job
    model: Model
    training: Training
    parallelism: Parallelism
    other: Unknown
"""
MODELS = """
llama3_configs = {
    "debug": Args(n_layers=6, n_heads=16),
    "8B": Args(n_layers=32, n_heads=32, n_kv_heads=8),
    "mixed": Args(moe_args=Experts(num_experts=12)),
    "strange": make(3),
}
"""
ARGUMENTS = """
@dataclass
class Args:
    n_layers: int = 4
    n_heads: int = 12
    n_kv_heads: int | None = None
    moe_args: Experts | None = None
"""
DEGREES = {"replicate": "data_parallel_replicate", "shard": "data_parallel_shard", "context": "context_parallel"}


@pytest.fixture
def torchtitan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A package of this name with these settings and models."""
    package = tmp_path / "packages" / "torchtitan"
    for name, text in {
        "__init__.py": "",
        "config/job_config.py": CONFIG,
        "models/llama3/__init__.py": MODELS,
        "models/llama3/model/args.py": ARGUMENTS,
    }.items():
        (package / name).parent.mkdir(parents=True, exist_ok=True)
        (package / name).write_text(text)

    class Found:
        origin = str(package / "__init__.py")

    monkeypatch.setattr("importlib.util.find_spec", lambda _: Found)


def types() -> Iterator[str]:
    """Values of every type for settings of every type."""
    values = (
        "1",
        "0",
        "-1",
        "1.5",
        "nan",
        "inf",
        "true",
        '"x"',
        '"only"',
        '"bfloat16"',
        "[]",
        "[1]",
        '["a"]',
        "{a = 1}",
    )
    names = ("model.plan", "model.odd", "training.steps", "training.dtype", "training.one", "training.seq_len")
    for name, value in itertools.product(names, values):
        section, _, key = name.partition(".")
        yield f"[{section}]\n{key} = {value}"
    for key, value in itertools.product(("workers", "share", "names"), values):
        yield f"[training.loader]\n{key} = {value}"
    yield from (
        'training = "x"',
        "[training]\nloader = 3",
        "[trainin]\na = 1",
        "[training]\nmade = 3",
        f'model = "{"y" * 90}"',
    )
    yield from (
        "[training.loader]\nmore = 1",
        '[job]\ncustom_config_module = "mine"\n[mine]\na = 1',
        "",
        "x = [",
        "a = 1",
    )


def jobs() -> Iterator[tuple[str, int]]:
    """Arguments and worlds: degrees, batches, sequences, experts, pipelines."""
    for degrees, world in itertools.product(
        ("", "shard=2", "replicate=2 shard=2", "context=2 shard=4", "replicate=3"), (1, 4, 8)
    ):
        words = (word.partition("=") for word in degrees.split())
        yield " ".join(f"parallelism.{DEGREES[name]}_degree={n}" for name, _, n in words), world
    for more, world in itertools.product(
        (
            "tensor_parallel_degree=2",
            "tensor_parallel_degree=8",
            "tensor_parallel_degree=16",
            "pipeline_parallel_degree=3",
        ),
        (8, 16, 24),
    ):
        for flavor in ("debug", "8B", "mixed", "strange", "none"):
            yield f"parallelism.{more} model.flavor={flavor}", world
    for schedule, less in itertools.product(("1F1B", "GPipe", "Interleaved1F1B"), ((0, 0), (1, 1), (3, 1))):
        for degree in (2, 4, 8):
            ends = zip(("first", "last"), less, strict=True)
            words = [f"parallelism.pipeline_parallel_{end}_stage_less_layers={n}" for end, n in ends]
            words += [
                f"parallelism.pipeline_parallel_degree={degree}",
                f"parallelism.pipeline_parallel_schedule={schedule}",
            ]
            yield " ".join(words), 8
    pipelined = "parallelism.pipeline_parallel_degree=8 parallelism."
    yield from (
        (f"{pipelined}pipeline_parallel_layers_per_stage=1", 8),
        (f"{pipelined}module_fqns_per_model_part=[]", 8),
    )
    yield from ((f"{pipelined}pipeline_parallel_microbatch_size={n} model.name=mine", 8) for n in (0, 2, 3))
    yield from ((f"training.global_batch_size={n}", 4) for n in (-1, 0, 32, 48, 64, 2**41))
    yield from ((f"training.seq_len={n} parallelism.tensor_parallel_degree=2", 4) for n in (2, 4, 1023, 2**29))
    yield from (
        (f"training.seq_len=1023 parallelism.tensor_parallel_degree=2 model.name={name}", 4) for name in ("flux", "x-y")
    )
    for experts, tensor in itertools.product((1, 4), (1, 2, 3)):
        words = f"expert_parallel_degree={experts} parallelism.expert_tensor_parallel_degree={tensor}"
        yield f"parallelism.{words} parallelism.tensor_parallel_degree=2", 4
    spread = "parallelism.expert_parallel_degree=8 parallelism.context_parallel_degree=2"
    yield from ((f"{spread} {more}", 8) for more in ("", "model.flavor=mixed", "parallelism.tensor_parallel_degree=4"))
    whole = f"{spread} parallelism.tensor_parallel_degree=4 parallelism.expert_tensor_parallel_degree=4"
    yield from ((f"{whole} {more}", 16) for more in ("", "parallelism.data_parallel_replicate_degree=2"))
    offload = "training.enable_cpu_offload"
    yield from ((f"{offload}{more}", 2) for more in ("", "=True", "=False", " parallelism.context_parallel_degree=2"))
    yield from (
        (f"{offload} parallelism.data_parallel_replicate_degree=2 model.name={n}", 2) for n in ("llama3", "mine")
    )
    yield from ((f"training.local_batch_size={text}", 1) for text in ("-1", "1.0", "none", "None", "1_0", "7"))


def answer(path: Path, overrides: tuple[str, ...], world_size: int) -> str:
    """What is said, "fine" if nothing."""
    try:
        check_job_file(str(path), overrides, world_size)
    except UsageError as e:
        return str(e).replace(str(path), "JOB")
    return "fine"


def test_what_is_said_of_jobs(torchtitan: None, tmp_path: Path) -> None:
    """Each job with its one line."""
    path = tmp_path / "job.toml"
    lines = []
    for text in types():
        path.write_text(text)
        lines.append(f"{text!r}: {answer(path, (), 8)}")
    path.write_text('[model]\nname = "llama3"\n')
    for words, world in jobs():
        lines.append(f"{world} {words}: {answer(path, tuple(f'--{word}' for word in words.split()), world)}")
    path.write_text("[training]\nseq_len = 0\n[parallelism]\ntensor_parallel_degree = 3\n")
    lines.append(answer(path, (), 4))
    path.write_text("[parallelism]\ntensor_parallel_degree = 3\n")
    lines.append(answer(path, (), 4))
    lines.append(answer(path, ("--training.custom-args-module=x", "--training.seq_len", "8"), 3))
    for name in ("debug", "8B", "mixed", "strange", "none"):
        lines.append(f"{name}: {titan_source.model_facts('llama3', name)} {titan_source.model_facts('no-name', name)}")
    check(Path(__file__).with_name("jobs.txt"), "\n".join(lines))


def test_settings_are_read_where_they_are_said(torchtitan: None, tmp_path: Path) -> None:
    """In the arguments, the file, or TorchTitan's defaults; None if nobody says."""
    path = tmp_path / "job.toml"
    path.write_text("[training]\nseq_len = 64\nsteps = 3\n")
    read = read_setting(str(path), ("--training.seq_len", "128", "--training.no-made"))
    assert [read(f"training.{name}") for name in ("seq_len", "steps", "dtype", "loader", "made", "none")] == [
        *("128", 3, "float32", None, "False", None)
    ]


@pytest.mark.parametrize(
    ("words", "found"),
    [
        ("--a.b 1 --a.b=2", {"a.b": "2"}),
        ("--a.b --c.d", {"a.b": "True", "c.d": "True"}),
        ("--a.no-b", {"a.b": "False"}),
        ("--a.b-c x y", {"a.b_c": "x"}),
        ("a.b 1 --a 2 --a.b.c 3", {}),
    ],
)
def test_settings_of_arguments(words: str, found: dict[str, str]) -> None:
    """With a value behind or after an equals sign, and switches; the last one counts."""
    assert given_settings(words.split()) == found


@pytest.mark.parametrize(
    ("words", "stray"),
    [
        ("--training.seq_len 5 6", "6"),
        ("--training.seq_len=5 6", "6"),
        ("--training.seq_len -5", None),
        ("--parallelism.pipeline_parallel_layers_per_stage 1 2", "2"),
        ("--training.enable_cpu_offload true", "true"),
        ("--training.no-enable_cpu_offload --training.seq_len 4", None),
        ("--model.odd one two", None),
        ("--training.loader.workers 1 2", None),
    ],
)
def test_arguments_that_stand_behind_no_option(torchtitan: None, tmp_path: Path, words: str, stray: str | None) -> None:
    """An option has one value, a switch none; what TorchTitan makes of other options is not known here."""
    path = tmp_path / "job.toml"
    path.write_text('[model]\nname = "mine"\n')
    complaint = answer(path, words.split(), 8)
    assert complaint.startswith(f"argument {stray}: expected --section.setting") == (stray is not None)


@pytest.mark.parametrize(
    ("argument", "said"),
    [
        ("--training.seq_lens=3", "there is no such setting; perhaps --training.seq_len"),
        ("--job.no-such", "there is no such setting; [job] has custom_config_module"),
        ("--trainer.seq_len", "there is no section trainer; it may be job, model, training, parallelism, autosac"),
        ("--training.no-loader", "fine"),
        ("--training.loader.workers", "fine"),
        ("stray", "expected --section.setting, or a value behind one"),
        ("-stray", "expected --section.setting, or a value behind one"),
    ],
)
def test_arguments_that_name_no_setting(torchtitan: None, tmp_path: Path, argument: str, said: str) -> None:
    """They are refused by name, with those that are near, unless the job brings settings of its own."""
    path = tmp_path / "job.toml"
    path.write_text('[model]\nname = "mine"\n')
    assert answer(path, (argument,), 8) == (said if said == "fine" else f"argument {argument}: {said}")
    own = ("--job.custom_config_module=mine", argument)
    assert answer(path, own, 8) == "fine"
