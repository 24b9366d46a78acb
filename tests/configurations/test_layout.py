"""Which layouts are legal, what they are in TorchTitan's settings, and how layers are divided over stages."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autosac.configurations.space.layout import (
    Layout,
    ModelFacts,
    arguments_of,
    checkpointing_of,
    divisors,
    legal,
    settings_of,
    why_none,
)
from autosac.configurations.space.space import Space, space_of, space_text
from autosac.configurations.space.splits import balanced_split, improved_split, module_names, torchtitan_split
from autosac.configurations.space.wanted import Own
from autosac.errors import UsageError
from autosac.jobs.checks import given_settings

LLAMA = ModelFacts(layers=80, heads=64, kv_heads=8, seq_len=8192)


def layouts(space: Space, world: int, batch: int, facts: ModelFacts = LLAMA) -> list[Layout]:
    """The legal ones on nodes of eight."""
    return list(legal(space, "any", world, 8, batch, facts, False))


def test_the_default_space_of_70b_on_128() -> None:
    """There are more than three hundred, all different, and all of them fill the GPUs and the global batch."""
    found = layouts(Space(), 128, 512)
    assert len(found) > 300
    assert len({layout.key for layout in found}) == len(found)
    for layout in found:
        assert layout.world_size == 128
        assert layout.microbatch * layout.microbatches * layout.data_parallel == 512
        assert layout.tensor <= 8 and 8 % layout.tensor == 0


def test_microbatches_and_pipelines_that_are_no_powers_of_two() -> None:
    """By default all that divide the global batch and the GPUs, and the job's own local batch however large it is."""
    found = layouts(space_of({"tensor_parallel": 1, "context_parallel": 1, "data_parallel_replicate": 1}), 6, 36)
    assert {layout.microbatch for layout in found if layout.pipeline == 1} == {1, 2, 3, 6}
    assert {layout.pipeline for layout in found} == {1, 2, 3, 6}
    large = layouts(space_of({"pipeline_parallel": 1}), 2, 96, LLAMA._replace(local_batch=48))
    assert max(layout.microbatch for layout in large) == 48


@pytest.mark.parametrize(
    ("space", "facts"),
    [
        ({"tensor_parallel": (3,)}, LLAMA),
        ({"tensor_parallel": (8,)}, LLAMA._replace(kv_heads=4)),
        ({"context_parallel": (2,), "tensor_parallel": (1,)}, LLAMA._replace(seq_len=2)),
        ({"pipeline_parallel": (8,), "tensor_parallel": (1,), "context_parallel": (1,)}, LLAMA._replace(layers=5)),
        ({"microbatch": (5,)}, LLAMA),
        ({"expert_parallel": (3,)}, LLAMA._replace(experts=8)),
        ({"async_tensor_parallel": (True,)}, LLAMA),
    ],
)
def test_what_cannot_be_is_not_tried(space: dict[str, object], facts: ModelFacts) -> None:
    """Degrees that do not divide heads, sequence, layers, batch or experts; asynchronous TP without compilation."""
    assert layouts(space_of(space), 8, 16, facts) == []


@pytest.mark.parametrize(
    ("space", "world", "batch", "message"),
    [
        ({"tensor_parallel": 16}, 8, 16, "no product of tensor, context and pipeline_parallel divides 8 GPUs"),
        ({"tensor_parallel": 3}, 8, 16, "no product of tensor"),
        (
            {"data_parallel_replicate": 3},
            8,
            16,
            "data_parallel_replicate does not divide the data-parallel ranks (1 or 2 or",
        ),
        (
            {"tensor_parallel": 1, "pipeline_parallel": 1},
            7,
            16,
            "a global batch of 16 is no multiple of the data-parallel ranks (7) times the microb",
        ),
        (
            {"tensor_parallel": 7, "pipeline_parallel": 1},
            7,
            16,
            "do not divide the model (64 heads, 8 key and value heads, 80",
        ),
        ({"async_tensor_parallel": True}, 8, 16, "what is left TorchTitan refuses"),
        (
            {"chunk_loss": True, "checkpointing": ["none", "full"]},
            8,
            16,
            'chunk_loss is what AutoSAC\'s plans do: checkpointing needs "autosac"',
        ),
    ],
)
def test_what_leaves_nothing_is_said(space: dict[str, object], world: int, batch: int, message: str) -> None:
    """The first condition that no layout meets, with the numbers that do not go together."""
    assert message in why_none(space_of(space), world, 8, batch, LLAMA, False)
    assert layouts(space_of(space), world, batch) == []


def test_a_global_batch_that_would_do_is_said() -> None:
    """The next multiple of all GPUs times the smallest microbatch, where there is a legal layout with it."""
    said = why_none(space_of({"tensor_parallel": 1, "pipeline_parallel": 1, "microbatch": 2}), 7, 8, 16, LLAMA, False)
    assert said.endswith("times the microbatch (2); --global-batch 28 would do")
    assert "--global-batch" not in why_none(space_of({"tensor_parallel": 3}), 8, 8, 16, LLAMA, False)


def test_degrees_that_no_model_allows_hide_no_other_reason() -> None:
    """Seven do not divide 64 heads: with the default degrees, what is wrong on seven GPUs is the global batch."""
    said = why_none(space_of({"pipeline_parallel": 1, "context_parallel": 1, "microbatch": 1}), 7, 8, 5, LLAMA, False)
    assert said == (
        "a global batch of 5 is no multiple of the data-parallel ranks (7) times the microbatch (1); --global-batch 7 would do"
    )


def test_odd_sequences_are_said() -> None:
    """TorchTitan divides a sequence by two, whatever the degrees are."""
    odd = LLAMA._replace(seq_len=4097)
    assert "an even number of tokens, not of 4097" in why_none(Space(), 8, 8, 16, odd, False)


def test_replicas_are_sharded_over_context_parallel_ranks() -> None:
    """Two replicas of one shard on four GPUs: with context parallelism FSDP has two ranks, with tensor parallelism none."""
    space = {"data_parallel_replicate": 2, "pipeline_parallel": 1, "microbatch": 1, "reshard_after_forward": "always"}
    both = space_of({**space, "tensor_parallel": (1, 2), "context_parallel": (1, 2)})
    assert [str(layout) for layout in layouts(both, 4, 4)] == [
        "replicate 2, fsdp 2, batch 1 x 1",
        "replicate 2, cp 2, batch 1 x 2",
    ]


def test_what_fsdp_shards_over() -> None:
    """Context parallelism's ranks share parameters, too."""
    sizes = [(1, 1), (2, 1), (1, 2), (2, 2)]
    found = [Layout(gpu="any", shard=shard, context=context).has_shards for shard, context in sizes]
    assert found == [False, True, True, True]


def test_torchtitans_default_of_resharding() -> None:
    """It frees all but the output's parameters, and none in a pipeline, where it is another name for never."""
    space = {"tensor_parallel": 1, "context_parallel": 1, "data_parallel_replicate": 1, "microbatch": 1}
    space |= {"pipeline_parallel": (1, 2), "pipeline_schedule": "GPipe", "pipeline_split": "torchtitan"}
    both = layouts(space_of({**space, "reshard_after_forward": ("default", "never")}), 4, 4)
    assert [(layout.pipeline, layout.reshard) for layout in both] == [(1, "default"), (1, "never"), (2, "never")]
    assert [(layout.keeps_parameters, layout.keeps_output) for layout in both] == [
        (False, True),
        (True, True),
        (True, True),
    ]
    alone = layouts(space_of({**space, "reshard_after_forward": "default"}), 4, 4)
    assert [layout.keeps_parameters for layout in alone] == [False, True]
    assert str(alone[0]) == "fsdp 4, batch 1 x 1, default reshard"


def test_an_optimizer_that_is_no_knobs_value_stays() -> None:
    """Unless the space names another one."""
    own = Own(facts=LLAMA, compiled=False, global_batch=8, optimizer="fused_opt_states_bf16")
    assert own.space(space_of({"microbatch": 1})).optimizer == ("fused_opt_states_bf16",)
    assert own.space(space_of({"optimizer": "fused"})).optimizer == ("fused",)
    assert Own(facts=LLAMA, compiled=False, global_batch=8).space(Space()) == Space()


def test_experts_are_spread_only_with_fsdp() -> None:
    """Two experts' ranks borrow those of tensor parallelism, but TorchTitan 0.2 refuses them without FSDP."""
    facts = LLAMA._replace(experts=8)
    space = space_of({"tensor_parallel": 2, "pipeline_parallel": 1, "context_parallel": 1, "expert_parallel": 2})
    assert layouts(space, 2, 4, facts) == []
    assert {layout.shard for layout in layouts(space, 4, 4, facts)} == {2}
    assert {layout.shard for layout in layouts(space, 2, 4, facts._replace(python=True))} == {1}


def test_torchtitan_03_shards_over_one_gpu_too() -> None:
    """There parameters of one FSDP rank may stay gathered, replicas stand beside anything, and sequences may be odd."""
    python = LLAMA._replace(python=True, seq_len=4097)
    alone = space_of({"tensor_parallel": 1, "context_parallel": 1, "pipeline_parallel": 1, "microbatch": 1})
    assert [str(layout) for layout in layouts(alone, 1, 1, python)] == ["batch 1 x 1", "batch 1 x 1, no reshard"]
    beside = space_of({"tensor_parallel": 2, "context_parallel": 1, "pipeline_parallel": 1, "microbatch": 1})
    found = layouts(beside, 4, 2, python._replace(seq_len=4096))
    assert {(layout.replicate, layout.shard) for layout in found} == {(1, 2), (2, 1)}
    assert layouts(beside, 4, 2, python) == []


def test_experts_share_tensor_parallelism_only_if_they_are_spread() -> None:
    """Experts on 2 ranks may be cut as the rest is, or not at all; those of no expert parallelism are not cut apart."""
    space = {"tensor_parallel": 2, "expert_tensor_parallel": (1, 2, 4), "expert_parallel": (1, 2)}
    found = layouts(space_of(space), 8, 16, LLAMA._replace(experts=8))
    assert {(layout.expert, layout.expert_tensor) for layout in found} == {(1, 1), (2, 1), (2, 2)}


def test_replicas_without_shards_stand_alone() -> None:
    """DDP beside tensor parallelism is refused by TorchTitan; HSDP and plain DDP are not."""
    found = layouts(Space(data_parallel_replicate=(4,), context_parallel=(1,), pipeline_parallel=(1,)), 8, 8)
    assert {(it.replicate, it.shard, it.tensor) for it in found} == {(4, 2, 1)}


def test_settings_are_arguments() -> None:
    """A layout's settings come back from the arguments that they are."""
    layout = Layout(gpu="any", shard=4, tensor=2, pipeline=2, microbatch=2, global_batch=32, compile=True)
    settings = settings_of(layout)
    assert settings["training.local_batch_size"] == 8
    assert settings["parallelism.pipeline_parallel_microbatch_size"] == 2
    assert given_settings(arguments_of(settings)) == {name: str(value) for name, value in settings.items()}


def test_accumulation_is_the_local_batch_without_a_pipeline() -> None:
    """Without a pipeline the local batch is one microbatch."""
    settings = settings_of(Layout(gpu="any", shard=4, microbatch=2, global_batch=32))
    assert (settings["training.local_batch_size"], settings["training.global_batch_size"]) == (2, 32)


@given(st.lists(st.integers(1, 9), min_size=1, max_size=9), st.integers(1, 4), st.integers(0, 9), st.integers(0, 9))
def test_balanced_splits_are_the_best(costs: list[int], stages: int, embedding: int, output: int) -> None:
    """No other division has a shorter slowest stage."""
    if stages > len(costs):
        with pytest.raises(ValueError, match="too few"):
            balanced_split(len(costs), stages, lambda *_: 0.0)
        return

    def stage_ms(stage: int, first: int, last: int) -> int:
        ends = (embedding if stage == 0 else 0) + (output if stage == stages - 1 else 0)
        return sum(costs[first:last]) + ends

    def slowest(split: tuple[int, ...]) -> int:
        ends = list(itertools.accumulate(split))
        times = [sum(costs[end - n : end]) for end, n in zip(ends, split, strict=True)]
        times[0] += embedding
        times[-1] += output
        return max(times)

    found = balanced_split(len(costs), stages, stage_ms)
    assert len(found) == stages and min(found) >= 1 and sum(found) == len(costs)
    cuts = itertools.combinations(range(1, len(costs)), stages - 1)
    ways = (tuple(b - a for a, b in itertools.pairwise((0, *cut, len(costs)))) for cut in cuts)
    assert slowest(found) == min(map(slowest, ways))


def test_improved_splits_cannot_be_improved_by_a_layer() -> None:
    """Stages 0 and 2 share a rank that has room for 5 layers: from equal stages, a layer goes where there is room."""

    def cost(split: tuple[int, ...]) -> tuple[int, int]:
        return max(0, split[0] + split[2] - 5), max(split)

    assert improved_split((3, 3, 3, 3), cost) == (2, 4, 3, 3)
    assert improved_split((1, 1), lambda split: split) == (1, 1)
    assert improved_split((2, 2, 2), lambda split: split[1]) == (2, 1, 3)
    assert improved_split((1, 1, 4), lambda split: split[1]) == (1, 1, 4)


def test_stages_of_a_rank_are_a_knob_of_interleaved_schedules() -> None:
    """1F1B has one stage a rank and ZBV two, whatever is asked for; 80 layers are enough for 64 stages, not for 128."""
    schedules = ("1F1B", "Interleaved1F1B", "ZBVZeroBubble")
    space = Space(
        tensor_parallel=(1,),
        context_parallel=(1,),
        pipeline_parallel=(8,),
        pipeline_schedule=schedules,
        stages_per_rank=(2, 8, 16),
        microbatch=(1,),
        reshard_after_forward=("always",),
    )
    found = layouts(space, 8, 16)
    assert len(set(found)) == len(found)
    assert {(it.schedule, it.stages_per_rank) for it in found} == {
        ("1F1B", 1),
        ("Interleaved1F1B", 2),
        ("Interleaved1F1B", 8),
        ("ZBVZeroBubble", 2),
    }


def test_the_job_says_how_much_less_its_ends_get() -> None:
    """Of 8 layers, 4 stages whose last has 2 layers fewer; it cannot have 3 fewer, but where stages are cut another way."""
    space = Space(pipeline_parallel=(4,), pipeline_schedule=("1F1B",), tensor_parallel=(1,), context_parallel=(1,))
    assert layouts(space, 4, 8, LLAMA._replace(layers=8, ends_less=(0, 2)))
    found = layouts(space, 4, 8, LLAMA._replace(layers=8, ends_less=(0, 3)))
    assert {layout.split for layout in found} == {"balanced"}


def test_balanced_stages_have_a_layer_each() -> None:
    """TorchTitan gives the ends of 8 stages none of 6 layers; nobody else can."""
    space = Space(pipeline_parallel=(8,), pipeline_schedule=("1F1B",), tensor_parallel=(1,), context_parallel=(1,))
    assert {layout.split for layout in layouts(space, 8, 8, LLAMA._replace(layers=6))} == {"torchtitan"}
    assert {layout.split for layout in layouts(space, 8, 8, LLAMA._replace(layers=8))} == {"torchtitan", "balanced"}


def test_module_names_of_a_split() -> None:
    """The embedding goes with the first layers, norm and output with the last."""
    assert module_names((1, 2)) == [["tok_embeddings", "layers.0"], ["layers.1", "layers.2", "norm", "output"]]


def test_torchtitans_split_by_hand() -> None:
    """80 layers on 4 stages: 82 shares, 21 for the first two; the embedding and the output take one each."""
    assert torchtitan_split(80, 4) == (20, 21, 20, 19)
    assert torchtitan_split(3, 8) is None


def test_a_space_survives_being_written() -> None:
    """What --show-space prints is a space file of the same space."""
    import tomllib

    space = Space(tensor_parallel=(1, 2), float8=(False, True), allocator=("expandable_segments:True", ""))
    assert space_of(tomllib.loads(space_text(space))) == space


@pytest.mark.parametrize(
    ("document", "message"),
    [
        ({"tensor_paralel": [1]}, "there is no knob 'tensor_paralel'"),
        ({"tensor_parallel": ["two"]}, "tensor_parallel is 'two': expected whole numbers"),
        ({"tensor_parallel": [0]}, "tensor_parallel is 0: expected 1 or more"),
        ({"microbatch": [2, 2]}, "a value is given twice"),
        ({"checkpointing": ["most"]}, "checkpointing is 'most'"),
        ({"compile": [1]}, "compile is 1: expected true or false"),
        ({"allocator": ["what:ever"]}, "allocator is"),
        ({"stages_per_rank": [1]}, "stages_per_rank is 1: expected 2 or more"),
        ({"microbatch": []}, "microbatch is []: expected at least one value"),
    ],
)
def test_wrong_spaces(document: dict[str, object], message: str) -> None:
    """One line that names the knob, its value and what is allowed."""
    with pytest.raises(UsageError) as error:
        space_of(document)
    assert message in str(error.value) and "\n" not in str(error.value)


def test_divisors() -> None:
    """Of twelve."""
    assert divisors(12) == (1, 2, 3, 4, 6, 12)


def test_what_only_plans_do_is_worked_out_under_plans_alone() -> None:
    """If the space has the same layout without it; else under every way of checkpointing."""
    plain = Layout(gpu="any")
    for name, other in (("chunk_loss", "activation_offload"), ("activation_offload", "chunk_loss")):
        both, only = (Space(checkpointing=("full", "autosac"), **{name: values}) for values in ((False, True), (True,)))
        layout = replace(plain, **{name: True})
        assert checkpointing_of(layout, both) == ("autosac",)
        assert checkpointing_of(layout, only) == checkpointing_of(plain, both) == ("full", "autosac")
        assert checkpointing_of(
            layout, Space(checkpointing=("full", "autosac"), **{name: (False, True), other: (True,)})
        ) == (
            "full",
            "autosac",
        )
