"""Simulations and plans through the public API, under every parallel dimension."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from autosac.capture.process.server import CaptureServer
from autosac.errors import CaptureError
from autosac.jobs.tasks import TitanJob, captures_of, plan_in, simulate_in
from autosac.planning.closed_loop import Goal, Planned
from autosac.planning.planner import full_plan
from autosac.report.summaries import mode_table
from autosac.simulation import Simulation
from autosac.trace import Phase

Job = Callable[..., TitanJob]
LONG = {"training__seq_len": 1024, "training__local_batch_size": 4}


@pytest.fixture
def server(capture_server: CaptureServer) -> CaptureServer:
    """One capture process for all tests here."""
    return capture_server


def test_plan_under_tensor_parallelism(job: Job, server: CaptureServer) -> None:
    """Between full checkpointing and none, a plan fits its budget, uses it, and recomputes less than full checkpointing."""
    budget = 250 * 2**20
    (planned,) = plan_in(
        server, job("llama3", 4, parallelism__tensor_parallel_degree=2, **LONG), Goal(budget_bytes=budget)
    )
    assert isinstance(planned, Planned), planned
    stated = {name: (p.peak_reserved_bytes or 0, p.recompute_ms) for name, p in planned.plan.predictions.items()}
    assert stated["full"][0] < 0.9 * budget <= stated["autosac"][0] <= budget < stated["none"][0]
    assert 0 == stated["none"][1] < stated["autosac"][1] < stated["full"][1]
    assert planned.plan.units and planned.simulation.peak_reserved_bytes == stated["autosac"][0]


def test_plan_of_a_model_whose_embeddings_tensor_parallelism_unties(
    job: Job, tmp_path: Path, server: CaptureServer
) -> None:
    """Qwen3 ties its output to its embedding; tensor parallelism gives each a DTensor of its own, and they are tied again when
    they are initialised. A plan that keeps nothing, made of what ran, is obeyed by the model as it is before that.
    """
    degrees = {"parallelism__tensor_parallel_degree": 2, "parallelism__data_parallel_replicate_degree": 2}
    (captures,) = captures_of(job("qwen3", 8, **degrees, **LONG), server, tmp_path, ("none",))
    none = captures.observed()
    plan = full_plan(none)
    planned = captures.under(plan)
    assert planned.peak_active_bytes < 0.9 * none.peak_active_bytes
    assert planned.recompute_ms > 0 == none.recompute_ms
    names = {name for name, _ in plan.made_for.parameters}
    assert {"output.weight", "tok_embeddings.weight"} <= names


def test_simulation_of_context_parallelism(job: Job, server: CaptureServer) -> None:
    """What is recomputed is not held: full checkpointing holds less than keeping attention and half of the products, which
    holds less than no checkpointing; their recomputation is in the reverse order.
    """
    wanted = job("llama3", 4, parallelism__context_parallel_degree=2, **LONG)
    none, others = simulate_in(server, wanted, beside=("full", "selective-op"))
    full, some = others["full"], others["selective-op"]
    assert isinstance(full, Simulation) and isinstance(some, Simulation)
    assert full.peak_active_bytes < some.peak_active_bytes < none.peak_active_bytes
    assert full.recompute_ms > some.recompute_ms > none.recompute_ms == 0
    assert full.step_ms > none.step_ms > 0


def test_tokens_that_are_sent_to_experts_are_recomputed(job: Job, tmp_path: Path, server: CaptureServer) -> None:
    """Expert parallelism sends them in hooks of a module that FSDP shards. A plan that keeps nothing holds as little as the
    job's own full checkpointing, to the byte.
    """
    wanted = job("deepseek_v3", 4, parallelism__expert_parallel_degree=4, **LONG)
    (captures,) = captures_of(wanted, server, tmp_path, ("none", "full"))
    none, full = captures.observed(), captures.baseline("full")
    planned = captures.under(full_plan(none))
    assert planned.peak_active_bytes == full.peak_active_bytes < none.peak_active_bytes


def test_a_job_that_torch_stops_at_is_compared(job: Job, server: CaptureServer) -> None:
    """Torch 2.13 itself fails under selective-op with experts over all ranks; the job is simulated all the same, with a note.
    Selective checkpointing recomputes fewer operators than full.
    """
    wanted = job("deepseek_v3", 2, parallelism__expert_parallel_degree=2)
    simulation, others = simulate_in(server, wanted, checkpointing="full", beside=("selective-op",))
    selective = others["selective-op"]
    assert isinstance(selective, Simulation)
    assert any("stops in the backward" in note for note in selective.trace.info.notes) == (torch.__version__ >= "2.13")
    assert not simulation.trace.info.notes
    again = [sum(op.phase == Phase.RECOMPUTE for _, op in s.trace.operators()) for s in (selective, simulation)]
    assert 0 < again[0] < again[1]


def test_a_comparison_that_fails_is_a_line_of_the_report(job: Job, server: CaptureServer) -> None:
    """What cannot be captured is named below the table."""
    simulation, _ = simulate_in(server, job("llama3", 1))
    table = mode_table(simulation, {"full": CaptureError("no way")})
    assert table.caption == "the job itself fails under full: no way"


PIPELINE = {"parallelism__pipeline_parallel_degree": 4, "training__local_batch_size": 4, "training__seq_len": 1024}


def test_peaks_of_pipeline_stages(job: Job, server: CaptureServer) -> None:
    """Four stages, four microbatches. The two in the middle have two layers each and nothing else: under 1F1B the second
    holds the activations of three microbatches and the third those of two, under GPipe both hold all four: from two to
    three and from three to four it is the same (but for buffers that neighbours are still sending from).
    """
    peaks = {}
    for schedule in ("1F1B", "GPipe"):
        simulation, _ = simulate_in(
            server, job("llama3", 4, parallelism__pipeline_parallel_schedule=schedule, **PIPELINE)
        )
        assert simulation.pipeline is not None
        stages = simulation.pipeline.stages
        assert [stage.trace.info.rank for stage in stages] == [0, 1, 2, 3]
        assert simulation.step_ms == simulation.pipeline.timeline.makespan_ms > 0
        peaks[schedule] = [stage.memory.peak().nbytes for stage in stages]
    early, late = peaks["1F1B"][1:3]
    together = peaks["GPipe"][1:3]
    assert early > late
    assert together[0] == together[1]
    assert together[0] - early == pytest.approx(early - late, rel=0.05)


def test_every_pipeline_stage_gets_its_own_policy(job: Job, server: CaptureServer) -> None:
    """Two stages under 1F1B: the first holds two microbatches where the second holds one. A plan has the units of both, and a
    budget that one of them cannot meet names the stage.
    """
    stages = {"parallelism__pipeline_parallel_degree": 2, "parallelism__pipeline_parallel_schedule": "1F1B"}
    wanted = job("llama3", 4, training__seq_len=2048, training__local_batch_size=4, **stages)
    budget = 275 * 2**20
    refused, planned = plan_in(server, wanted, Goal(budget_bytes=budget), (150 * 2**20, budget))
    assert str(refused).startswith("pipeline stage 0: no plan meets 150.0 MiB reserved: the smallest budget")

    assert isinstance(planned, Planned), planned
    told = " ".join(planned.notes)
    assert "stage 0:" in told and "stage 1:" in told and "waiting for other stages" in told
    assert planned.plan.made_for.pipeline_stages == 2
    stated = {name: (p.peak_reserved_bytes or 0, p.step_ms) for name, p in planned.plan.predictions.items()}
    assert stated["full"][0] < stated["autosac"][0] <= budget < stated["none"][0]
    assert stated["none"][1] < stated["autosac"][1] < stated["full"][1]
    names = {name.partition(".")[0] for name, _ in planned.plan.made_for.parameters}
    assert names == {"tok_embeddings", "layers", "norm", "output"}


def test_a_rank_of_a_later_pipeline_stage(job: Job, tmp_path: Path, server: CaptureServer) -> None:
    """Looked at by itself it has the memory that it has among all stages, also as the captures of a plan begin."""
    whole = job("llama3", 4, parallelism__pipeline_parallel_degree=2)
    together, _ = simulate_in(server, whole, checkpointing="none")
    assert together.pipeline is not None
    (last,) = captures_of(replace(whole, rank=3), server, tmp_path, ("none",))
    assert last.observed().trace.info.rank == 3
    assert last.observed().peak_active_bytes == together.pipeline.stages[1].peak_active_bytes


def test_tied_embeddings_in_fsdp_units(job: Job, server: CaptureServer) -> None:
    """Torch 2.13 refuses them; the error names DDP, under which the job runs."""
    with pytest.raises(CaptureError, match=r"use tensor parallelism \(parallelism.tensor_parallel_degree = 2\) or DDP"):
        simulate_in(server, job("qwen3", 4))
    ddp = {"parallelism__data_parallel_replicate_degree": 4, "parallelism__data_parallel_shard_degree": 1}
    simulation, _ = simulate_in(server, job("qwen3", 4, **ddp))
    assert simulation.trace.info.model == "qwen3 debugmodel"
