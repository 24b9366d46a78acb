"""The trace of a job from cuts of it is the trace of the job, operator for operator."""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path

import pytest

from autosac.capture.process.server import CaptureServer
from autosac.capture.request import TitanRequest
from autosac.derivation import UncheckpointedStep
from autosac.induction import Capturing, Refusal, TraceFamily, capturing, difference, joined
from autosac.planning.planner import Goal, Planner, plan_of
from autosac.plans.layers import in_all_layers
from autosac.simulation import Target, simulation_of
from autosac.trace import Collective, Cut, Op, Phase, Trace

SMALL = ("--training.local_batch_size", "2", "--training.seq_len", "128")
EIGHT_B = ("--model.name", "llama3", "--model.flavor", "8B", *SMALL)


@pytest.fixture
def server(capture_server: CaptureServer) -> CaptureServer:
    """One capture process for all tests here."""
    return capture_server


def _request(model: str, world_size: int, *arguments: str, mode: str = "none") -> TitanRequest:
    return TitanRequest(
        config_file=None,
        overrides=("--model.name", model, "--model.flavor", "debugmodel", *SMALL, *arguments),
        world_size=world_size,
        checkpointing=mode,
        observe=mode == "none",
    )


def _cuts(server: CaptureServer, request: TitanRequest, first: int, period: int, *more: int) -> list[Future[Trace]]:
    """Captures of three cuts, and of jobs with these numbers of layers."""
    return [
        server.submit(replace(request, layers=layers)) for layers in (*(first + i * period for i in range(3)), *more)
    ]


def _joined(futures: list[Future[Trace]], first: int, period: int, total: int) -> Trace:
    cuts = [future.result() for future in futures[:3]]
    return joined(
        [replace(cut, info=replace(cut.info, cut=Cut(first + i * period, period, total))) for i, cut in enumerate(cuts)]
    )


JOBS = {
    "alone": (_request("llama3", 1), 3, 1, 8),
    "fsdp": (_request("llama3", 8), 3, 1, 12),
    "fsdp, full": (_request("llama3", 8, mode="full"), 3, 1, 8),
    "fsdp, every second block": (_request("llama3", 8, mode="selective-2"), 5, 2, 11),
    "fsdp, selective-op": (_request("llama3", 8, mode="selective-op"), 3, 1, 8),
    "fsdp, never resharded": (_request("llama3", 8, "--parallelism.fsdp_reshard_after_forward", "never"), 3, 1, 8),
    "tp": (_request("llama3", 2, "--parallelism.tensor_parallel_degree", "2"), 3, 1, 8),
    "compiled": (_request("llama3", 8, "--compile.enable", mode="selective-op"), 4, 1, 8),
    "dense, then experts": (_request("deepseek_v3", 8), 4, 1, 8),
    "experts spread, prefetched": (_request("deepseek_v3", 8, "--parallelism.expert_parallel_degree", "4"), 5, 1, 9),
    "experts in every second layer": (_request("llama4", 8), 4, 2, 10),
    "pipeline": (
        replace(
            _request("llama3", 2, "--parallelism.pipeline_parallel_degree", "2"),
            overrides=(
                "--model.name",
                "llama3",
                "--model.flavor",
                "debugmodel",
                "--parallelism.pipeline_parallel_degree",
                "2",
                "--training.local_batch_size",
                "4",
                "--training.seq_len",
                "128",
            ),
        ),
        6,
        2,
        12,
    ),
    "pipeline, tp": (
        _request(
            "llama3",
            4,
            "--parallelism.pipeline_parallel_degree",
            "2",
            "--parallelism.tensor_parallel_degree",
            "2",
            "--parallelism.pipeline_parallel_schedule",
            "1F1B",
        ),
        6,
        2,
        12,
    ),
}


@pytest.mark.parametrize("job", JOBS)
def test_a_replayed_trace_is_the_full_capture(server: CaptureServer, job: str) -> None:
    """Every row, operand, storage, allocation, module, region and entry of info is that of the capture of all layers."""
    request, first, period, total = JOBS[job]
    futures = _cuts(server, request, first, period, total)
    replayed = _joined(futures, first, period, total)
    full = futures[3].result()
    assert difference(replayed, full) is None
    assert replayed == full
    forward = {event.module for event in full.events if type(event) is Op and event.phase is Phase.FORWARD}
    entered = {full.modules[m].split(".")[1] for m in forward if full.modules[m].startswith("layers.")}
    assert len(entered) == (total // 2 if "pipeline" in job else total)
    assert "fsdp" not in job or any(type(event) is Collective for event in full.events)


def test_layers_that_alternate_do_not_repeat_one_by_one(server: CaptureServer) -> None:
    """Experts in every second layer: one layer more is no period."""
    request = _request("llama4", 1)
    with pytest.raises(Refusal):
        _joined(_cuts(server, request, 5, 1), 5, 1, 8)


def test_a_job_of_many_layers_is_cut(server: CaptureServer) -> None:
    """Qwen3 14B on 8 GPUs, 40 layers from 3, 4 and 5: the same trace as from all of them."""
    request = replace(
        _request("llama3", 8, mode="selective-op"), overrides=("--model.name", "qwen3", "--model.flavor", "14B", *SMALL)
    )
    refused: list[str] = []
    under_way = capturing(server, request, refused.append)
    full = server.submit(request)
    assert server.capture(replace(request, cut=0)).info.cut == Cut(3, 1, 40)
    assert difference(under_way.result(), full.result()) is None
    assert refused == []


class Uncheckpointed:
    """The step without checkpointing; notes what it answers."""

    def __init__(self, capture: Capturing | Future[Trace]) -> None:
        assert isinstance(capture, Capturing)
        self.first_cut = capture.first_cut
        self._step = UncheckpointedStep(capture.result())
        self.answers: list[bool] = []

    def agrees(self, trace: Trace) -> bool:
        self.answers.append(self._step.is_in(trace))
        return self.answers[-1]


@pytest.mark.parametrize("mode", ["full", "selective-op"])
def test_two_cuts_of_a_job_with_checkpointing_are_enough(server: CaptureServer, mode: str) -> None:
    """The step without checkpointing confirms what they predict: the capture of all layers, row by row."""
    request = replace(_request("llama3", 8, mode=mode), overrides=EIGHT_B)
    none = Uncheckpointed(capturing(server, replace(request, checkpointing="none", observe=True)))
    under_way = capturing(server, request, reference=none)
    assert difference(under_way.result(), server.capture(request)) is None
    assert none.answers == [True] and none.first_cut() == 0


@pytest.mark.long
def test_two_cuts_of_a_job_whose_smallest_is_special(server: CaptureServer) -> None:
    """Llama-4 Scout with experts spread over 8 GPUs: what their own FSDP units free in the first layers is another thing.
    The second cut and the third predict the step with 48 layers; the first and the second do not, and that is noticed.
    """
    scout = ("--model.name", "llama4", "--model.flavor", "17bx16e", "--parallelism.expert_parallel_degree", "8", *SMALL)
    request = replace(_request("llama4", 16, mode="full"), overrides=scout)
    none = Uncheckpointed(capturing(server, replace(request, checkpointing="none", observe=True)))
    under_way = capturing(server, request, reference=none)
    assert difference(under_way.result(), server.capture(request)) is None
    assert none.answers == [True] and none.first_cut() == 1
    cuts = [server.capture(replace(request, cut=cut)) for cut in (0, 1, 2)]
    plain = [server.capture(replace(request, checkpointing="none", cut=cut)) for cut in (0, 1, 2)]
    bare = [replace(cut, info=replace(cut.info, cut=None)) for cut in cuts]
    assert UncheckpointedStep(plain[2]).is_in(cuts[2])
    assert not UncheckpointedStep(plain[2]).is_in(TraceFamily(bare[:2]).member(2))


def test_a_job_under_a_plan_for_every_layer_is_cut(server: CaptureServer, tmp_path: Path) -> None:
    """Llama-3 8B on 8 GPUs, all 32 layers checkpointed, from 3, 4 and 5 of them: the same trace as from all."""
    request = replace(_request("llama3", 8), overrides=EIGHT_B)
    base = simulation_of(capturing(server, request).result(), Target.of("h100-sxm-80gb", 8))
    planner = Planner(base, Goal(budget_bytes=2**30))
    units = tuple(unit.recompute_all() for unit in planner.policies.units if unit.name.count(".") == 1)
    assert len(units) == 32
    plan_of(base, planner.goal, units).save(tmp_path / "plan.json")
    under = replace(request, observe=False, checkpointing="plan", plan_file=str(tmp_path / "plan.json"))
    refused: list[str] = []
    under_way = capturing(server, under, refused.append)
    full = server.submit(under)
    assert server.capture(replace(under, cut=0)).info.cut == Cut(3, 1, 32)
    assert difference(under_way.result(), full.result()) is None
    assert refused == []


def test_a_middle_stage_under_a_plan_is_cut(server: CaptureServer, tmp_path: Path) -> None:
    """The second of three pipeline stages of 21 layers, all of its own checkpointed, from jobs with 9, 12 and 15 layers.

    Between its microbatches nothing else is allocated, and in a smaller job it has other layers.
    """
    overrides = ("--parallelism.pipeline_parallel_degree", "3", "--training.local_batch_size", "3")
    sent = server.capture(replace(_request("llama3", 3, *overrides), layers=9)).info.stage_outputs
    request = replace(_request("llama3", 3, *overrides), rank=1, stage_inputs=sent)
    base = simulation_of(server.capture(replace(request, layers=21)), Target.of("h100-sxm-80gb", 3))
    planner = Planner(base, Goal(budget_bytes=2**30))
    units = tuple(unit.recompute_all() for unit in planner.policies.units if unit.name.count(".") == 1)
    assert [unit.fqn for unit in units] == [f"layers.{layer}" for layer in range(7, 15)]
    plan = plan_of(base, planner.goal, units)
    wide = in_all_layers(plan, 21)
    assert wide is not None
    files = [str(tmp_path / name) for name in ("plan.json", "wide.json")]
    plan.save(Path(files[0]))
    wide.save(Path(files[1]))
    own, other = (replace(request, observe=False, checkpointing="plan", plan_file=file) for file in files)
    futures = _cuts(server, other, 9, 3)
    assert difference(_joined(futures, 9, 3, 21), server.capture(replace(own, layers=21))) is None


@pytest.mark.parametrize(
    "overrides",
    [
        ("--model.flavor", "debugmodel"),
        ("--model.flavor", "8B", "--parallelism.pipeline_parallel_layers_per_stage", "16"),
        ("--model.flavor", "8B", "--parallelism.data_parallel_replicate_degree", "8"),
    ],
    ids=["few layers", "stages of fixed size", "buckets of gradients"],
)
def test_a_job_that_is_not_worth_cutting_is_captured_whole(server: CaptureServer, overrides: tuple[str, ...]) -> None:
    """With few layers, or where stages or DDP's buckets have sizes of their own, the 0th cut is the job itself."""
    arguments = ("--model.name", "llama3", *SMALL, *overrides)
    request = TitanRequest(config_file=None, overrides=arguments, cut=0, world_size=8 if "8" in overrides else 1)
    trace = server.capture(request)
    assert trace.info.cut is None
    assert len({name for name in trace.modules if name.count(".") == 1}) == (6 if "debugmodel" in overrides else 32)
