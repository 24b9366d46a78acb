"""Values that cannot be: what refuses them, in which words, and that the last possible value is taken."""

from __future__ import annotations

import builtins
import importlib
from collections.abc import Callable
from typing import Any

import pytest

from autosac.chakra import schema
from autosac.cli.parser import main
from autosac.configurations.eager import combinations
from autosac.configurations.evaluating.evaluations import checked
from autosac.configurations.evaluating.workers import RayWorkers
from autosac.configurations.running.jobs import check_space
from autosac.configurations.space.layout import USUAL_STAGES
from autosac.configurations.space.offers import Offer, offers_of
from autosac.configurations.space.space import Space
from autosac.configurations.space.splits import balanced_split
from autosac.errors import CaptureError, SimulationError, UsageError
from autosac.estimator import AlphaBeta, ChunkProfile, LogSigmoid, load_hardware
from autosac.estimator.cluster import Placement
from autosac.estimator.nccl import choose
from autosac.estimator.network.flows import FlowModel
from autosac.estimator.sac_curves import evaluate, upper_bound
from autosac.files.documents import DocumentError, parse_toml
from autosac.limits import MOST_GPUS
from autosac.memory_sim import AllocatorConfig
from autosac.solvers.closure import Closure, Operator, UnitResult
from autosac.titan.python_jobs import PythonJob

H100 = load_hardware("h100-sxm-80gb")
PLACE = Placement(
    ranks=16,
    nodes=2,
    ranks_per_node=8,
    racks=1,
    intra_gbps=400.0,
    intra_latency_us=1.0,
    inter_gbps=200.0,
    inter_latency_us=5.0,
)
ABC = (Operator(1.0), Operator(2.0, (0,)), Operator(3.0, (1,)))


def python_job(*, pipelines: bool = True, layers_per_stage: int | None = None) -> PythonJob:
    """A configuration of TorchTitan 0.3."""
    settings = {"parallelism.pipeline_parallel_layers_per_stage": layers_per_stage}
    return PythonJob(
        module="m",
        function="f",
        settings=settings,
        facts={},
        given={},
        checkpointing={},
        pipelines=pipelines,
        digest="",
    )


REFUSED: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "no GPU": (lambda: Offer(gpu="x", world_size=0), UsageError, "0 x x: expected 1 to 131,072 GPUs"),
    "too many GPUs": (
        lambda: Offer(gpu="x", world_size=MOST_GPUS + 1),
        UsageError,
        "131073 x x: expected 1 to 131,072 GPUs",
    ),
    "a negative price": (lambda: Offer(gpu="x", price=-0.5), UsageError, "price -0.5 of x: expected 0 or more"),
    "a price beyond all": (
        lambda: Offer(gpu="x", price=1e9),
        UsageError,
        "price 1000000000.0 of x: expected 0 or more",
    ),
    "no count": (
        lambda: offers_of("a:2,b", ()),
        UsageError,
        "--gpus 'b': expected NAME:COUNT, such as h100-sxm-80gb:128",
    ),
    "no name": (
        lambda: offers_of(":2", ()),
        UsageError,
        "--gpus ':2': expected NAME:COUNT, such as h100-sxm-80gb:128",
    ),
    "a name twice": (lambda: offers_of("a:2, a:4", ()), UsageError, "--gpus: a is given twice"),
    "no values": (lambda: list(combinations({"a": [1], "b": []})), UsageError, "space: b has no values"),
    "too many combinations": (
        lambda: next(combinations({"a": range(101), "b": range(100)})),
        UsageError,
        "space: more than 10,000 combinations of settings; name fewer values",
    ),
    "no answer": (lambda: checked([1]), CaptureError, "an evaluation has no answer"),
    "more stages than layers": (
        lambda: balanced_split(3, 4, lambda *_: 1.0),
        ValueError,
        "3 layers are too few for 4 stages",
    ),
    "balanced stages": (
        lambda: check_space(Space(pipeline_split=("balanced",)), python_job()),
        UsageError,
        'pipeline_split = ["balanced"] needs TorchTitan 0.2',
    ),
    "other stages": (
        lambda: check_space(Space(stages_per_rank=(USUAL_STAGES + 1,)), python_job()),
        UsageError,
        f"stages_per_rank other than [{USUAL_STAGES}] needs TorchTitan 0.2",
    ),
    "float8": (
        lambda: check_space(Space(float8=(False, True)), python_job()),
        UsageError,
        "float8 = [true]: with TorchTitan 0.3 the configuration itself chooses it (its model's converters)",
    ),
    "chunked loss": (
        lambda: check_space(Space(chunk_loss=(True,)), python_job()),
        UsageError,
        "chunk_loss = [true]: with TorchTitan 0.3 the configuration itself chooses it (ChunkedCELoss)",
    ),
    "alpha-beta": (
        lambda: AlphaBeta(H100).estimate("all_mixed", 8, PLACE),
        SimulationError,
        "no cost model knows the collective 'all_mixed'",
    ),
    "log-sigmoid": (
        lambda: LogSigmoid(H100).estimate("all_mixed", 8, PLACE),
        SimulationError,
        "no cost model knows the collective 'all_mixed'",
    ),
    "flows": (
        lambda: FlowModel(H100).estimate("all_mixed", 8, PLACE),
        SimulationError,
        "no cost model knows the collective 'all_mixed'",
    ),
    "NCCL's choice": (
        lambda: choose("all_to_all", 8, PLACE),
        SimulationError,
        "NCCL has no algorithms to choose from for 'all_to_all'",
    ),
    "no channels": (
        lambda: ChunkProfile(channels=0),
        SimulationError,
        "a chunk profile needs channels and a chunk size for LL, LL128 and Simple",
    ),
    "a protocol is missing": (
        lambda: ChunkProfile(chunk_bytes=(("LL", 1), ("Simple", 1))),
        SimulationError,
        "a chunk profile needs channels and a chunk size for LL, LL128 and Simple",
    ),
    "links beyond their speed": (
        lambda: ChunkProfile(link_efficiency=1.01),
        SimulationError,
        "a chunk profile needs a link efficiency in (0, 1] and a positive reduce_gbps",
    ),
    "no link": (
        lambda: ChunkProfile(link_efficiency=0.0),
        SimulationError,
        "a chunk profile needs a link efficiency in (0, 1] and a positive reduce_gbps",
    ),
    "no sums": (
        lambda: ChunkProfile(reduce_gbps=0.0),
        SimulationError,
        "a chunk profile needs a link efficiency in (0, 1] and a positive reduce_gbps",
    ),
    "points that stand": (
        lambda: upper_bound(((0.0, 0.0), (0.0, 1.0))),
        UsageError,
        "the points of a trade-off curve must ascend",
    ),
    "points that fall": (
        lambda: upper_bound(((0.0, 1.0), (0.5, 0.5))),
        UsageError,
        "the points of a trade-off curve must ascend",
    ),
    "no segments": (
        lambda: upper_bound(((0.0, 0.0), (1.0, 1.0)), 0),
        UsageError,
        "a trade-off curve needs at least one segment, not 0",
    ),
    "an allocator's option without value": (
        lambda: AllocatorConfig.parse("max_split_size_mb"),
        UsageError,
        "max_split_size_mb has no value; write max_split_size_mb:<value>",
    ),
    "a result that nobody makes": (
        lambda: Closure(ABC[:1], (UnitResult(8, 0, ()),), ()),
        UsageError,
        "result 0 needs makers among the operators, in ascending order",
    ),
    "makers out of order": (
        lambda: Closure(ABC[:2], (UnitResult(8, 0, (1, 0)),), ()),
        UsageError,
        "result 0 needs makers among the operators, in ascending order",
    ),
    "a maker that is not there": (
        lambda: Closure(ABC[:1], (UnitResult(8, 0, (0, 1)),), ()),
        UsageError,
        "result 0 needs makers among the operators, in ascending order",
    ),
    "negative memory": (
        lambda: Closure(ABC[:1], (UnitResult(-1, 0, (0,)),), ()),
        UsageError,
        "result 0 has a negative memory",
    ),
    "a negative time": (
        lambda: Closure((Operator(-0.1),), (), ()),
        UsageError,
        "operator 0 has an impossible time",
    ),
    "an endless time": (
        lambda: Closure((Operator(float("inf")),), (), ()),
        UsageError,
        "operator 0 has an impossible time",
    ),
    "read before it is made": (
        lambda: Closure((Operator(1.0, (0,)),), (UnitResult(8, 0, (0,)),), ()),
        UsageError,
        "operator 0 reads result 0, which is not made before it",
    ),
    "asked for, and not there": (
        lambda: Closure(ABC[:1], (UnitResult(8, 0, (0,)),), (1,)),
        UsageError,
        "the backward asks for a result that is not there",
    ),
    "a byte order mark": (
        lambda: parse_toml("\ufeffa = 1".encode()),
        DocumentError,
        "it begins with a byte order mark, which TOML does not allow: save it as UTF-8 without BOM",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_is_refused(case: str) -> None:
    """One line that says what is wrong, and the value."""
    call, kind, message = REFUSED[case]
    with pytest.raises(kind) as error:
        call()
    assert message in str(error.value)


def test_the_last_possible_values_are_taken() -> None:
    """One step before the refusals above."""
    assert Offer(gpu="x", world_size=MOST_GPUS, price=1e9 - 1).world_size == 2**17
    assert [(offer.gpu, offer.world_size) for offer in offers_of("a:b:2", ())] == [("a:b", 2)]
    assert len(list(combinations({"a": range(100), "b": range(100)}))) == 10_000
    assert balanced_split(3, 3, lambda *_: 1.0) == (1, 1, 1)
    assert ChunkProfile(channels=1, link_efficiency=1.0, reduce_gbps=1e-9).channels == 1
    assert evaluate(upper_bound(((0.0, 1.0), (1.0, 1.0))), 0.5) == 1.0
    assert Closure(ABC, (UnitResult(0, 0, (0,)), UnitResult(8, 1, (1,))), (0, 1)).needed(()) == (
        frozenset({0, 1}),
        frozenset(),
    )


@pytest.mark.parametrize("name", ["autosac", "autosac.bench", "autosac.estimator", "autosac.estimator.calibration"])
def test_packages_have_no_other_names(name: str) -> None:
    """What is loaded on first use is looked up by name; another one is an AttributeError, as of any module."""
    module = importlib.import_module(name)
    with pytest.raises(AttributeError, match=f"module '{name}' has no attribute 'nonsense'"):
        _ = module.nonsense


def test_what_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray and protobuf: the command that installs them."""
    real = builtins.__import__

    def without(name: str, *arguments: Any, **more: Any) -> Any:
        if name.partition(".")[0] in ("ray", "google"):
            raise ImportError(name)
        return real(name, *arguments, **more)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(UsageError, match=r"^--ray needs Ray: pip install 'autosac\[ray\]'$"):
        RayWorkers("auto")
    schema.messages.cache_clear()
    with pytest.raises(UsageError, match=r"^Chakra's traces need protobuf: pip install autosac\[chakra\]$"):
        schema.messages()
    schema.messages.cache_clear()


def test_pipelines_of_one_number_of_stages() -> None:
    """A configuration that divides the layers itself is searched without pipelines, or where it cannot run them anyway."""
    own = python_job(layers_per_stage=2)
    with pytest.raises(UsageError, match="search without pipelines"):
        check_space(Space(pipeline_parallel=(1, 2)), own)
    check_space(Space(pipeline_parallel=(1,)), own)
    check_space(Space(pipeline_parallel=(1, 2)), python_job())
    check_space(Space(pipeline_parallel=(1, 2)), python_job(pipelines=False, layers_per_stage=2))
    check_space(Space(pipeline_split=("balanced",)), None)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("search", "--gpu", "h100-sxm-80gb"), "a search needs a job (see autosac search --help)"),
        (("search", "j.toml", "--gpu", "l40s", "--study", "a", "--resume", "b"), "give --study or --resume, not both"),
        (("calibrate", "j.toml", "--sweep", "-o", "p.toml"), "give a job or --sweep, not both"),
    ],
)
def test_options_that_exclude_each_other(
    words: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Said before any work, with exit code 2."""
    assert main(list(words)) == 2
    assert capsys.readouterr().err.strip().endswith(message)
