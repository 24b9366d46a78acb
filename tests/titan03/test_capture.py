"""Capture of TorchTitan 0.3 jobs: parallel dimensions, checkpointing, and what cannot be done."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from autosac.errors import AutosacError, CaptureError, UsageError
from autosac.planning.closed_loop import planner_for
from autosac.planning.compiled_costs import unit_costs
from autosac.planning.compiled_policies import groups_of
from autosac.planning.planner import Goal
from autosac.plans import Decision, Plan, Unit
from autosac.simulation import Target, simulation_of
from autosac.trace import Collective, Op, Phase, Trace
from plans import MADE_FOR

Capture = Callable[..., Trace]
PARTIAL = ("--parallelism.spmd_backend", "partial_dtensor")
DEBUG = "llama3:llama3_debugmodel"
EAGER = ("--training.disable_cuda_graphs",)
DIM, LAYERS, VOCABULARY, TOKENS = 256, 2, 2048, 2 * 64
HIDDEN = 768  # two thirds of 4 * 256, up to a multiple of 256
IN_LAYERS = LAYERS * (4 * DIM * DIM + 3 * DIM * HIDDEN)
WEIGHTS = IN_LAYERS + DIM * VOCABULARY
PIPELINE = ("--parallelism.pipeline_parallel_degree", "2", *EAGER)
# What TorchTitan 0.3 itself asks of PyTorch for `spmd_types` on several GPUs and for pipelines.
NEW_TORCH = tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 14)
STEP = tuple(phase for phase in Phase if phase is not Phase.SETUP)


def matmul_flops(trace: Trace, *phases: Phase) -> int:
    """Of the matrix multiplications in these phases, by default in the whole step."""
    total = 0
    for event in trace.events:
        if isinstance(event, Op) and event.phase in (phases or STEP):
            signature = trace.signatures[event.signature]
            if signature.name == "aten.mm.default":
                (m, k), (_, n) = (tensor.shape for tensor in signature.inputs[:2])
                total += 2 * m * k * n
    return total


def collectives(trace: Trace) -> Counter[str]:
    """Collectives by kind."""
    return Counter(event.kind for event in trace.events if isinstance(event, Collective))


def test_single_device(capture: Capture) -> None:
    """Without checkpointing a step does 6 FLOPs a weight and token, 2 of them in the forward; the job is described."""
    trace = capture(checkpointing="none")
    assert matmul_flops(trace) == 6 * WEIGHTS * TOKENS
    assert matmul_flops(trace, Phase.RECOMPUTE) == 0
    info = trace.info
    assert info.model == "llama3 debugmodel" and info.checkpointing == "none"
    assert info.torchtitan_version.startswith("0.3") and info.early_stop is False
    assert info.tokens_per_step == TOKENS
    assert info.parameter_shapes["layers.1.feed_forward.w2.weight"] == (DIM, HIDDEN)
    assert info.job_settings["training.seq_len"] == "64"
    assert not collectives(trace)


def test_checkpointing(capture: Capture) -> None:
    """Full checkpointing repeats the layers' forwards; TorchTitan's selective policy every second matrix multiplication."""
    full, selective = capture(checkpointing="full"), capture()
    assert full.info.checkpointing == "full" and selective.info.checkpointing == "selective-op"
    assert matmul_flops(full, Phase.RECOMPUTE) == 2 * IN_LAYERS * TOKENS
    assert 0 < matmul_flops(selective, Phase.RECOMPUTE) < 2 * IN_LAYERS * TOKENS
    assert capture(checkpointing="selective-op").info.preserve_rng_state is True


def test_observation_sees_the_layers(capture: Capture) -> None:
    """Observing implies no checkpointing, and records the regions that a plan could decide on."""
    trace = capture(observe=True)
    assert trace.info.checkpointing == "none"
    assert {"layers.0", "layers.1"} <= {trace.modules[region.module] for region in trace.regions}


def test_fsdp(capture: Capture) -> None:
    """Eight ranks gather every unit and scatter its gradient; each does the whole work for its own tokens."""
    trace = capture(world_size=8)
    kinds = collectives(trace)
    assert trace.info.parallelism.dp_shard == 8
    assert trace.info.fsdp_units == ("", "layers.0", "layers.1", "lm_head", "norm", "tok_embeddings")
    assert kinds["all_gather"] >= 5 and kinds["reduce_scatter"] >= 5
    assert matmul_flops(capture(world_size=8, checkpointing="none")) == 6 * WEIGHTS * TOKENS


def test_tensor_parallelism(capture: Capture) -> None:
    """Two ranks share the work in the layers and of the vocabulary, under both of the sharding back ends."""
    degree = ("--parallelism.tensor_parallel_degree", "2")
    trace = capture(*degree, world_size=2, checkpointing="none")
    assert matmul_flops(trace) == 3 * WEIGHTS * TOKENS
    assert collectives(trace)["all_gather"] and collectives(trace)["reduce_scatter"]
    full = capture(*degree, "--parallelism.spmd_backend", "full_dtensor", world_size=2, checkpointing="none", job=DEBUG)
    partial = capture(*degree, *PARTIAL, world_size=2, checkpointing="none", job=DEBUG)
    assert matmul_flops(full) == matmul_flops(partial)


@pytest.mark.skipif(not NEW_TORCH, reason="fully_shard does not know spmd_types")
def test_spmd_types(capture: Capture) -> None:
    """Whether ranks share data or tensors, they compute and transfer what they do under the other sharding back end."""
    for degree in ((), ("--parallelism.tensor_parallel_degree", "2")):
        typed = capture(*degree, "--parallelism.spmd_backend", "spmd_types", world_size=2, checkpointing="none")
        partial = capture(*degree, *PARTIAL, world_size=2, checkpointing="none")
        assert matmul_flops(typed) == matmul_flops(partial) == 6 * WEIGHTS * TOKENS // (2 if degree else 1)
        assert collectives(typed) == collectives(partial)


@pytest.mark.skipif(not NEW_TORCH, reason="schedules do not take lists of microbatches")
def test_pipelines(capture: Capture) -> None:
    """Two stages do together what one GPU does; what one sends, for each of the 2 sequences, the other receives."""
    first = capture(*PIPELINE, world_size=2, checkpointing="none")
    second = capture(*PIPELINE, world_size=2, rank=1, stage_inputs=first.info.stage_outputs, checkpointing="none")
    assert matmul_flops(first) + matmul_flops(second) == 6 * WEIGHTS * TOKENS
    assert first.info.stage_outputs == second.info.stage_outputs == (((1, 64, DIM), (64 * DIM, DIM, 1), "bfloat16"),)
    assert collectives(first)["send"] == collectives(second)["recv"] >= 2


def test_context_parallelism_with_flex_attention(capture: Capture) -> None:
    """Two ranks share the tokens of each sequence."""
    degree = ("--parallelism.context_parallel_degree", "2")
    whole = capture(*PARTIAL, job=DEBUG, checkpointing="none")
    half = capture(*degree, *PARTIAL, job=DEBUG, world_size=2, checkpointing="none")
    assert 2 * matmul_flops(half) == matmul_flops(whole)


def test_expert_parallelism(capture: Capture) -> None:
    """Tokens travel to the experts and back: two exchanges in each MoE layer, forward and backward, at least."""
    trace = capture(
        "--parallelism.expert_parallel_degree",
        "2",
        *PARTIAL,
        *EAGER,
        job="deepseek_v3:deepseek_v3_debugmodel",
        world_size=2,
        checkpointing="none",
    )
    assert trace.info.parallelism.ep == 2
    assert collectives(trace)["all_to_all"] >= 4


def test_compilation(capture: Capture) -> None:
    """Compiled blocks run Inductor's kernels, and the same matrix multiplications."""
    trace = capture("--compile.enable", checkpointing="none")
    names = {trace.signatures[event.signature].name for event in trace.events if isinstance(event, Op)}
    assert any(name.startswith("triton.triton_") for name in names)
    assert matmul_flops(trace) == 6 * WEIGHTS * TOKENS


def test_compiled_layers_run_policies_of_their_own(capture: Capture, tmp_path: Path) -> None:
    """The first layer recomputes everything, the second what the compiler does by itself: less memory, more time."""
    observed = capture("--compile.enable", observe=True, checkpointing="none")
    operators = [(call.op, call.occurrence) for call in observed.regions[0].calls if call.occurrence >= 0]
    rows = tuple(Decision(op=op, occurrence=i, keep=False, outputs=()) for op, i in operators)
    unit = Unit(fqn="layers.0", discard_fraction=1.0, kept_bytes=0, recompute_ms=0.0, decisions=rows)
    path = tmp_path / "plan.json"
    Plan(made_for=MADE_FOR, units=(unit,)).save(path)
    trace = capture("--compile.enable", checkpointing="plan", plan_file=str(path))
    costs = unit_costs(simulation_of(trace, Target.of("h100-sxm-80gb", 1)), ("layers.0", "layers.1"))
    assert costs["layers.0"].nbytes < costs["layers.1"].nbytes and costs["layers.0"].ms > costs["layers.1"].ms


def test_compiled_layers_with_flexible_attention_follow_their_policies(capture: Capture, tmp_path: Path) -> None:
    """Of the planner's policies one with decisions keeps, compiled, the bytes that it says, to the byte; its neighbour, which
    recomputes everything, none. Inductor makes every graph.
    """
    job = partial(capture, "--compile.enable", *EAGER, job="jobs:flexible")
    target = Target.of("h100-sxm-80gb", 1)
    observed, none = (simulation_of(job(checkpointing="none", observe=o), target) for o in (True, False))
    (group,) = groups_of(planner_for(observed, none, Goal(budget_bytes=1)).policies, none.trace)
    full, few = [policy for policy in group.policies if policy.has_decisions][:2]
    units = [policy.of(unit) for policy, unit in zip((full, few), group.units, strict=True)]
    plan = Plan(made_for=MADE_FOR, units=tuple(unit for unit in units if unit is not None))
    plan.save(tmp_path / "plan.json")
    trace = job(checkpointing="plan", plan_file=str(tmp_path / "plan.json"))
    costs = unit_costs(simulation_of(trace, target, plan), [unit.fqn for unit in plan.units])
    assert [cost.nbytes for cost in costs.values()] == [unit.kept_bytes for unit in plan.units]
    assert plan.units[0].kept_bytes == 0 < plan.units[1].kept_bytes
    assert not any("Inductor could not compile" in note for note in trace.info.notes)


def test_a_job_that_has_a_plan_is_captured_under_another_policy(capture: Capture) -> None:
    """`AutoSAC` in the configuration does not count where the request says how to checkpoint; what all policies share does."""
    trace = capture(job="jobs:planned", checkpointing="full")
    assert trace.info.checkpointing == "full" and trace.info.preserve_rng_state is False
    assert trace.info.job_fingerprint == capture().info.job_fingerprint
    with pytest.raises(UsageError, match="is checkpointed by a plan: give --plan missing"):
        capture(job="jobs:planned")


@pytest.mark.parametrize(
    ("job", "overrides", "message"),
    [
        ("jobs:nothing", (), "Config function 'nothing' not found in jobs"),
        ("nowhere:nothing", (), "Cannot import module 'nowhere'"),
        ("needy:nothing", (), ": no_such_package is not installed"),
        ("jobs:no_model", (), "without a model to train"),
        ("jobs:tiny", ("--training.nothing", "3"), "Unrecognized options"),
    ],
)
def test_wrong_jobs(capture: Capture, job: str, overrides: tuple[str, ...], message: str) -> None:
    """What TorchTitan's command line would reject is rejected with its words, on one line."""
    with pytest.raises(UsageError) as caught:
        capture(*overrides, job=job)
    assert message in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("overrides", "settings", "message"),
    [
        ((), {"checkpointing": "selective-2"}, "no selective-2 checkpointing: none, full or selective-op"),
        pytest.param(
            ("--parallelism.spmd_backend", "spmd_types"),
            {"world_size": 2},
            "add -- --parallelism.spmd_backend partial_dtensor (or full_dtensor); a model of spmd_types alone needs",
            marks=pytest.mark.skipif(NEW_TORCH, reason="torch 2.14 can"),
        ),
        pytest.param(
            PIPELINE,
            {"world_size": 2},
            "no pipeline schedules that take lists",
            marks=pytest.mark.skipif(NEW_TORCH, reason="torch 2.14 can"),
        ),
    ],
)
def test_what_cannot_be_done(
    capture: Capture, overrides: tuple[str, ...], settings: dict[str, Any], message: str
) -> None:
    """Checkpointing that TorchTitan 0.3 has not, and what it needs a newer torch for, on one line."""
    with pytest.raises(AutosacError) as caught:
        capture(*overrides, **settings)
    assert isinstance(caught.value, UsageError | CaptureError)
    assert message in str(caught.value) and "\n" not in str(caught.value)
