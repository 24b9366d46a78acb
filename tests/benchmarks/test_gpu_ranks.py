"""Process groups of one process that stands for many ranks; attention's calls as traces have them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from autosac.estimator.work import attention_shape
from benchmarks.gpu.attention import Shape, shapes, signature_of
from benchmarks.gpu.experts import COUNTED, calls
from benchmarks.gpu.products import prices_us

_PROGRAM = """
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from benchmarks.gpu import alone

alone.initialise(8)
own = torch.arange(16.0)
whole = torch.empty(8, 16)
dist.all_gather_into_tensor(whole, own)
assert torch.equal(whole, own.expand(8, 16))
part = torch.empty(2)
dist.reduce_scatter_tensor(part, own)
assert part.tolist() == [0.0, 1.0]
received = functional.all_to_all_single(own, [16] + [0] * 7, [2] * 8, dist.group.WORLD)
assert torch.equal(received, own)
mesh = init_device_mesh("cpu", (4, 2), mesh_dim_names=("shards", "replicas"))
assert (dist.get_world_size(), dist.get_world_size(mesh["shards"].get_group())) == (8, 4)
torch.manual_seed(0)
model = torch.nn.Linear(8, 8)
plain = [parameter.detach().clone() for parameter in model.parameters()]
fully_shard(model, mesh=mesh["shards"])
model(torch.ones(2, 8)).sum().backward()
weight = model.weight
assert isinstance(weight, DTensor) and weight.to_local().shape == (2, 8)
assert torch.equal(weight.to_local(), plain[0][:2])
assert torch.equal(weight.grad.to_local(), torch.full((2, 8), 2.0))
"""


def test_one_process_is_the_first_of_eight_ranks_whose_peers_have_the_same() -> None:
    """All-gathers repeat, reduce-scatters keep the own part, all-to-alls give back, and FSDP2 trains on that."""
    root = Path(__file__).resolve().parents[2]
    ended = subprocess.run([sys.executable, "-c", _PROGRAM], cwd=root, capture_output=True, text=True, timeout=300)
    assert ended.returncode == 0, ended.stderr


@pytest.mark.parametrize("backward", [False, True])
def test_calls_of_attention_are_read_as_they_were_meant(backward: bool) -> None:
    """Every shape of the grid comes back from its signature, with the mask's share of the tiles."""
    for shape in shapes():
        read = attention_shape(signature_of(shape, backward=backward))
        assert read is not None
        assert (read.batch, read.heads, read.kv_heads) == (shape.batch, shape.heads, shape.kv_heads)
        assert (read.query_length, read.key_length, read.head_size) == (shape.length, shape.kv_length, shape.head_size)
        assert (read.backward, read.dropout) == (backward, shape.dropout)


@pytest.mark.parametrize(
    ("causal", "window", "share"),
    [(True, 0, 1.0), (False, 0, 16 / 10), (True, 128, 7 / 10), (True, 129, 7 / 10), (True, 130, 9 / 10)],
)
def test_tiles_of_block_masks(causal: bool, window: int, share: float) -> None:
    """Of four tiles a side ten are causal; a window of up to 129 positions reaches one tile back, one of 130 two."""
    shape = Shape("flex", 1, 1, 1, 512, 512, 64, causal, window=window)
    read = attention_shape(signature_of(shape, backward=False))
    assert read is not None and read.share == pytest.approx(share)


def test_every_call_of_experts_has_one_price() -> None:
    """A product of one row moves what its traffic takes at least; a call on the host runs one operator each."""
    found = dict(
        zip(((call.kind, call.name) for call in calls()), prices_us("h200-sxm-141gb", calls(), COUNTED), strict=True)
    )
    traffic_us = 4 * 32768 * (8 + 9 * 2048) / 4800e3
    assert found["one row", "32768 x [1, 8] x [8, 2048]"] > traffic_us
    assert min(found.values()) > 0
