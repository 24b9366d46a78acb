"""What every parallel dimension transfers, worked out by hand from the model's shapes.

llama3's debug model with 3 layers of width 256, vocabulary 2048; deepseek_v3's with 3 layers of width 256, the last 2 with 8
experts of which each token takes 3. A rank has 2 sequences of 128 tokens.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from math import prod

import pytest

from autosac.trace import Collective, Label, Phase, Trace

Capture = Callable[..., Trace]
LAYERS, WIDTH, TOKENS = 3, 256, 2 * 128
MIXTURES, EXPERTS, TOP_K = 2, 8, 3
BF16, FP32 = 2, 4


def transfers(trace: Trace, kind: str, phase: Phase | None = None) -> Counter[tuple[int, tuple[tuple[int, int], ...]]]:
    """How many collectives of a kind there are, by bytes and by the group's structure."""
    return Counter(
        (event.nbytes, trace.groups[event.group].dims)
        for event in trace.events
        if type(event) is Collective and event.kind == kind and phase in (None, event.phase)
    )


def count(trace: Trace, kind: str, phase: Phase) -> int:
    """How many collectives of a kind a phase has."""
    return transfers(trace, kind, phase).total()


def parameters(trace: Trace, part: str = "") -> int:
    """Elements of the whole model's parameters whose names have this part."""
    return sum(prod(shape) for name, shape in trace.info.parameter_shapes.items() if part in name)


def resident(trace: Trace, label: Label) -> int:
    """Bytes on the device between two steps."""
    return sum(trace.storages[s].nbytes for s in trace.residents() if trace.storages[s].label is label)


def launched(trace: Trace, name: str = "") -> int:
    """Operators whose name has this part and that launch something."""
    signatures = [trace.signatures[op.signature] for _, op in trace.operators()]
    return sum(name in signature.name and not signature.is_view for signature in signatures)


def test_single_device(capture: Capture) -> None:
    """One GPU transfers nothing and holds everything, in float32."""
    trace = capture("llama3", 1)
    assert not [event for event in trace.events if type(event) is Collective]
    assert resident(trace, Label.PARAMETER) == resident(trace, Label.GRADIENT) == FP32 * parameters(trace)


def test_ddp(capture: Capture) -> None:
    """All gradients are reduced once over all ranks, nothing is gathered, every rank holds everything."""
    options = {"parallelism__data_parallel_replicate_degree": 8, "parallelism__data_parallel_shard_degree": 1}
    trace = capture("llama3", 8, **options)
    reduced = transfers(trace, "all_reduce", Phase.BACKWARD)
    assert sum(nbytes * n for (nbytes, _), n in reduced.items()) == FP32 * parameters(trace)
    assert {dims for _, dims in reduced} == {((8, 1),)}
    assert not transfers(trace, "all_gather") and not transfers(trace, "reduce_scatter")
    assert resident(trace, Label.PARAMETER) == FP32 * parameters(trace)


@pytest.mark.parametrize(("policy", "again"), [("default", LAYERS + 1), ("always", LAYERS + 2), ("never", 0)])
def test_resharding_after_the_forward(capture: Capture, policy: str, again: int) -> None:
    """Five units (embedding, layers, output) are gathered in the forward. In the backward they are gathered again: all
    but the last by default, all if always resharded, none if never. Gradients are reduced in any case.
    """
    trace = capture("llama3", 8, parallelism__fsdp_reshard_after_forward=policy)
    assert count(trace, "all_gather", Phase.FORWARD) == count(trace, "reduce_scatter", Phase.BACKWARD) == LAYERS + 2
    assert count(trace, "all_gather", Phase.BACKWARD) == again


def test_cpu_offload(capture: Capture) -> None:
    """Parameters, gradients and optimizer states are on the host between the steps; what is gathered is the same."""
    trace, plain = capture("llama3", 8, training__enable_cpu_offload=True), capture("llama3", 8)
    for label in (Label.PARAMETER, Label.GRADIENT, Label.OPTIMIZER_STATE):
        assert resident(trace, label) == 0 < resident(plain, label)
    assert transfers(trace, "all_gather") == transfers(plain, "all_gather")


def test_gradient_accumulation(capture: Capture) -> None:
    """Two batches of two make a global batch of 32 on 8 ranks: twice the transfers and products, one optimizer step."""
    twice, once = capture("llama3", 8, training__global_batch_size=32), capture("llama3", 8)
    assert twice.info.tokens_per_step == 2 * once.info.tokens_per_step == 2 * TOKENS
    for kind in ("all_gather", "reduce_scatter"):
        assert transfers(twice, kind) == Counter({key: 2 * n for key, n in transfers(once, kind).items()})
    assert launched(twice, "aten.mm.") == 2 * launched(once, "aten.mm.")
    assert launched(twice, "_fused_adam") == launched(once, "_fused_adam") > 0


def test_sequence_and_loss_parallelism(capture: Capture) -> None:
    """TP 2: before attention, the feed-forward and the output layer the sequence is gathered, after the embedding,
    attention and the feed-forward partial sums are scattered along it; the backward does the reverse. The loss exchanges
    three numbers for each token: maximum, sum, and the label's logit.
    """
    trace = capture("llama3", 4, parallelism__tensor_parallel_degree=2)
    pair, activations = ((2, 1),), BF16 * TOKENS * WIDTH
    for phase in (Phase.FORWARD, Phase.BACKWARD):
        assert transfers(trace, "all_gather", phase)[activations, pair] == 2 * LAYERS + 1
        assert transfers(trace, "reduce_scatter", phase)[activations, pair] == 2 * LAYERS + 1
    assert transfers(trace, "all_reduce", Phase.FORWARD) == {(FP32 * TOKENS, pair): 3}


def test_without_loss_parallelism(capture: Capture) -> None:
    """The logits are gathered instead, and the loss exchanges nothing."""
    trace = capture("llama3", 4, parallelism__tensor_parallel_degree=2, parallelism__disable_loss_parallel=True)
    logits = BF16 * TOKENS * 2048
    assert transfers(trace, "all_gather", Phase.FORWARD)[logits, ((2, 1),)] == 1
    assert not transfers(trace, "all_reduce", Phase.FORWARD)


def test_ring_attention(capture: Capture) -> None:
    """CP 4: each layer gathers keys and values (16 heads of 16: 256 wide) of all ranks, in the forward and again in the
    backward, which passes their gradients on from rank to rank, once for each of the 4 blocks. Every rank attends 4 times.
    """
    trace = capture("llama3", 4, parallelism__context_parallel_degree=4)
    ring, keys_and_values = ((4, 1),), BF16 * 2 * TOKENS * WIDTH
    for phase in (Phase.FORWARD, Phase.BACKWARD):
        assert transfers(trace, "all_gather", phase)[keys_and_values, ring] == LAYERS
    # In float32, in which the blocks' gradients are summed.
    assert transfers(trace, "all_to_all") == {(FP32 * 2 * TOKENS // 4 * WIDTH, ring): 4 * LAYERS}
    assert launched(trace, "attention_backward") == 4 * LAYERS


def test_the_rotation_is_torchtitans(capture: Capture) -> None:
    """TorchTitan 0.2.2 sets the ring's method in its validation only: a training step is the same with either."""
    gathered = capture("llama3", 4, parallelism__context_parallel_degree=4)
    options = {"parallelism__context_parallel_rotate_method": "alltoall"}
    assert capture("llama3", 4, parallelism__context_parallel_degree=4, **options).events == gathered.events


def test_expert_parallelism(capture: Capture) -> None:
    """EP 4: each mixture exchanges how many tokens go to each of 8 experts, then sends every token to 3 experts and back;
    the backward sends both ways again. Experts are sharded over the other 2 ranks, everything else over all 8.
    """
    trace = capture("deepseek_v3", 8, parallelism__expert_parallel_degree=4)
    near, far, rows = ((4, 1),), ((2, 4),), BF16 * TOKENS * TOP_K * WIDTH
    counts = {(8 * EXPERTS, near): MIXTURES}
    assert transfers(trace, "all_to_all", Phase.FORWARD) == Counter({(rows, near): 2 * MIXTURES}) + Counter(counts)
    assert transfers(trace, "all_to_all", Phase.BACKWARD) == {(rows, near): 2 * MIXTURES}
    experts = parameters(trace, ".experts.") // MIXTURES // 4
    for phase in (Phase.FORWARD, Phase.BACKWARD):
        assert transfers(trace, "all_gather", phase)[BF16 * experts, far] == MIXTURES
    assert transfers(trace, "reduce_scatter")[FP32 * experts, far] == MIXTURES


def test_expert_tensor_parallelism(capture: Capture) -> None:
    """EP 4 with TP 2 inside each expert: tokens are exchanged between every second rank, all of their width; gradients of
    what enters the experts are summed over the pair.
    """
    options = {"tensor_parallel_degree": 2, "expert_parallel_degree": 4, "expert_tensor_parallel_degree": 2}
    trace = capture("deepseek_v3", 8, **{f"parallelism__{name}": value for name, value in options.items()})
    rows = BF16 * TOKENS * TOP_K * WIDTH
    assert transfers(trace, "all_to_all", Phase.FORWARD)[rows, ((4, 2),)] == 2 * MIXTURES
    assert transfers(trace, "all_reduce", Phase.BACKWARD)[rows, ((2, 1),)] == MIXTURES


@pytest.mark.parametrize(
    ("model", "options", "name"),
    [
        ("llama3", {}, "_scaled_dot_product_cudnn_attention"),
        ("llama3 debugmodel_flex_attn", {}, "flex_attention"),
        ("llama3 debugmodel_varlen_attn", {}, "_varlen_attn"),
        ("llama3", {"compile__enable": True}, "_scaled_dot_product_cudnn_attention"),
    ],
    ids=["sdpa", "flex", "varlen", "compiled"],
)
def test_attention(capture: Capture, model: str, options: dict[str, bool], name: str) -> None:
    """Each layer attends once in the forward and once in the backward; how it attends and whether it is compiled changes
    nothing of what FSDP transfers.
    """
    trace, plain = capture(model, 8, **options), capture("llama3", 8)
    assert launched(trace, name) == 2 * LAYERS
    for kind in ("all_gather", "reduce_scatter"):
        assert transfers(trace, kind) == transfers(plain, kind)


def test_compiling_saves_launches(capture: Capture) -> None:
    """The compiled step has the same products and fewer other kernels."""
    compiled, eager = capture("llama3", 8, compile__enable=True), capture("llama3", 8)
    assert launched(compiled, "aten.mm.") == launched(eager, "aten.mm.")
    assert launched(compiled) < launched(eager)
