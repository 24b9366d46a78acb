"""`price` on hand-made traces."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pytest

from autosac.estimator import Cluster, Estimate, Models, default_models, load_hardware, price
from autosac.estimator.collectives import AlphaBeta
from autosac.estimator.network.chance import largest_normal
from autosac.estimator.roofline import Roofline
from autosac.trace import Free, Signature, TensorMeta, Trace
from autosac.trace.info import Parallelism

H100 = load_hardware("h100-sxm-80gb")
CLUSTER = Cluster(
    name="c",
    nodes=2,
    gpus_per_node=8,
    intra_gbps=500.0,
    intra_latency_us=1.0,
    inter_gbps=400.0,
    inter_latency_us=5.0,
)
PLAIN = Models(operators=(Roofline(H100),), collectives=AlphaBeta(H100, efficiency=0.8, start_us=8.0))


def test_prices_line_up_with_the_events(
    make_trace: Callable[..., Trace], mm: Callable[..., Signature], meta: Callable[..., TensorMeta]
) -> None:
    """An mm, a view, an unknown operator, an all-gather of 8 ranks in a node, and a Free; the slowest of 8 GPUs computes."""
    x = meta((2**20,), "float32")
    view = Signature("aten.view.default", (x,), (x,), is_view=True)
    unknown = Signature("mylib.fancy.default", (x,), (x,))
    trace = make_trace([mm(8192, 8192, 8192), view, unknown, unknown], [("all_gather", 2**30)], world=8)
    object.__setattr__(trace, "events", (*trace.events, Free(0)))
    prices = price(trace, H100, CLUSTER, models=PLAIN)
    slowest = 1 + 0.021 * largest_normal(8)
    product = slowest * (2 * 8192**3 / (989e12 * 0.72) * 1e3 + 0.0026)
    fancy = slowest * (2 * 2**22 / (3350e9 * 0.88) * 1e3 + 0.0026)
    gather = 7 / 8 * 2**30 / 400e9 * 1e3 + 0.008 + 0.007
    assert prices.event_ms == pytest.approx([product, 0.0, fancy, fancy, gather, 0.0])
    assert [prices.source[i] if i >= 0 else None for i in prices.event_source] == [
        "roofline",
        None,
        "bytes",
        "bytes",
        "alpha-beta",
        None,
    ]
    assert prices.unknown == {"mylib.fancy.default": pytest.approx(2 * fancy)}
    assert prices.shares() == pytest.approx({"roofline": product, "alpha-beta": gather, "bytes": 2 * fancy})


def test_each_signature_is_priced_once_and_in_order_of_preference(
    make_trace: Callable[..., Trace], mm: Callable[..., Signature]
) -> None:
    """The first model that answers serves; the next sees only what is left."""
    asked: list[int] = []

    class Knows:
        def __init__(self, limit: int) -> None:
            self.limit = limit

        def estimate(self, signatures: Sequence[Signature]) -> list[Estimate | None]:
            asked.append(len(signatures))
            rows = [s.inputs[0].shape[0] for s in signatures]
            return [Estimate(1.0, f"up to {self.limit}", 0.1) if m <= self.limit else None for m in rows]

    models = Models(operators=(Knows(2), Knows(9), Roofline(H100)), collectives=PLAIN.collectives)
    signatures = [mm(1, 8, 8), mm(5, 8, 8), mm(99, 8, 8)]
    trace = make_trace(signatures)
    object.__setattr__(trace, "events", trace.events * 10)
    prices = price(trace, H100, CLUSTER, models=models)
    assert asked == [3, 2]
    assert prices.source == ("up to 2", "up to 9", "roofline")
    assert prices.event_rel_std[0] == pytest.approx(0.1)


def test_float32_precision_comes_from_the_trace(make_trace: Callable[..., Trace], mm: Callable[..., Signature]) -> None:
    """A job that allows TF32 for products pays its rate."""
    product = mm(8192, 8192, 8192, "float32")
    plain = price(make_trace([product]), H100).event_ms[0]
    tf32 = price(make_trace([product], matmul_allows_tf32=True), H100).event_ms[0]
    assert plain / tf32 > 3


def test_transfers_between_two_ranks_use_the_link_between_them(make_trace: Callable[..., Trace]) -> None:
    """A send from rank 0 to rank 1 stays in the node; to rank 8 it leaves."""
    trace = make_trace([], [("send", 2**30), ("send", 2**30)], world=16)
    near, far = (event._replace(peer=peer) for event, peer in zip(trace.events, (1, 8), strict=True))
    object.__setattr__(trace, "events", (near, far))
    times = price(trace, H100, CLUSTER, models=PLAIN).event_ms
    assert times == pytest.approx([2**30 / 400e6 + 0.009, 2**30 / (50e6 * 0.8) + 0.013])


def test_an_empty_trace_costs_nothing(make_trace: Callable[..., Trace]) -> None:
    """No events, no prices."""
    prices = price(make_trace([]), H100)
    assert prices.event_ms.shape == (0,)
    assert prices.source == ()


def test_operators_on_the_host_take_no_device_time(
    make_trace: Callable[..., Trace], meta: Callable[..., TensorMeta]
) -> None:
    """An operator whose tensors are all on the host is not priced."""
    x = meta((100,), "float32", "cpu")
    prices = price(make_trace([Signature("aten.add.Tensor", (x, x), (x,))]), H100)
    assert prices.event_ms.tolist() == [0.0]
    assert prices.event_source.tolist() == [-1]


def test_default_models_know_every_operator(meta: Callable[..., TensorMeta]) -> None:
    """The last model in the default order has an answer to anything."""
    x = meta((10,))
    answers = default_models(H100).operators[-1].estimate([Signature("who.knows.this", (x,), ())])
    assert answers[0] is not None
    assert np.isfinite(answers[0].ms)


def test_rank_0_is_a_peer_like_any_other(make_trace: Callable[..., Trace]) -> None:
    """Rank 1 sends to rank 0 within the node, though their group of 16 ranks spans two."""
    trace = make_trace([], [("send", 2**30)], world=16, rank=1)
    object.__setattr__(trace, "events", tuple(event._replace(peer=0) for event in trace.events))
    assert price(trace, H100, CLUSTER, models=PLAIN).event_ms == pytest.approx([2**30 / 400e6 + 0.009])


def test_received_chunks_of_context_parallelism_take_longer(
    make_trace: Callable[..., Trace], meta: Callable[..., TensorMeta]
) -> None:
    """Half of the keys of another rank: 1.27 times the kernel's time; the rank's own keys and jobs without it as they are."""
    query, half = meta((1, 8, 4096, 128)), meta((1, 8, 2048, 128))
    name = "aten._scaled_dot_product_flash_attention.default"
    own = Signature(name, (query, query, query), (query,), (("is_causal", True),))
    received = Signature(name, (query, half, half), (query,))
    alone, parallel = (
        price(make_trace([own, received], parallelism=Parallelism(cp=cp)), H100, CLUSTER) for cp in (1, 2)
    )
    assert parallel.event_ms == pytest.approx(alone.event_ms * [1.0, 1.27])
    assert parallel.event_rel_std[1] > alone.event_rel_std[1]
