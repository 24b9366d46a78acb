"""What captures hand to later ones: a call, or a decision of DTensor, that is answered by it is the one made anew."""

from __future__ import annotations

import pickle
import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor._op_schema import OpSchema
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils import _pytree as pytree

from autosac.capture.device.cache import DispatchCache
from autosac.capture.device.recipes import Known, operator_named
from autosac.capture.patches.shardings import Decisions

aten = torch.ops.aten
Make = Callable[..., torch.Tensor]
Call = tuple[Any, Callable[[Make], tuple[tuple[Any, ...], dict[str, Any]]]]


def calls(seed: int) -> list[Call]:
    """Operators, each with a function that makes its arguments, with sizes that the seed decides: views, in-place, of several
    results, with lists, without tensors, random ones.
    """
    chance = random.Random(seed)
    b, m, n, k = (chance.randint(1, 5) for _ in range(4))
    dtype = chance.choice([torch.float32, torch.bfloat16])
    dim = chance.randint(-2, 1)
    like = {"dtype": dtype, "device": torch.device("cpu")}
    found: list[Call] = [
        (aten.mm.default, lambda t: ((t(m, k), t(k, n)), {})),
        (aten.bmm.default, lambda t: ((t(b, m, k), t(b, k, n)), {})),
        (aten.addmm.default, lambda t: ((t(n), t(m, k), t(k, n)), {"beta": 1, "alpha": 0.5})),
        (aten.add.Tensor, lambda t: ((t(b, 1, n), t(m, 1)), {"alpha": 2})),
        (aten.add_.Tensor, lambda t: ((t(b, n), t(n)), {})),
        (aten.mul.Scalar, lambda t: ((t(b, n), -0.5), {})),
        (aten.t.default, lambda t: ((t(m, n),), {})),
        (aten.view.default, lambda t: ((t(b, m, n), [b * m, n]), {})),
        (aten.transpose.int, lambda t: ((t(m, n), dim, 0), {})),
        (aten.slice.Tensor, lambda t: ((t(m, n), dim, 0, 2), {})),
        (aten.select.int, lambda t: ((t(m, n), dim, 0), {})),
        (aten.expand.default, lambda t: ((t(m, 1), [b, m, n]), {})),
        (aten.split.Tensor, lambda t: ((t(2 * m, n), m), {})),
        (aten.unbind.int, lambda t: ((t(m, n), dim), {})),
        (aten.cat.default, lambda t: (([t(m, n), t(k, n)],), {})),
        (aten.sum.dim_IntList, lambda t: ((t(m, n), [dim], True), {"dtype": torch.float32})),
        (aten.max.dim, lambda t: ((t(m, n), dim), {})),
        (aten.var_mean.correction, lambda t: ((t(m, n), [dim]), {"correction": 1, "keepdim": True})),
        (aten._log_softmax.default, lambda t: ((t(m, n), dim, False), {})),
        (aten.bernoulli.p, lambda t: ((t(m, n), 0.1), {})),
        (aten._softmax.default, lambda t: ((t(m, n), dim, False), {})),
        (aten.clone.default, lambda t: ((t(m, n).t(),), {"memory_format": torch.contiguous_format})),
        (aten.empty_like.default, lambda t: ((t(m, n).t(),), {"memory_format": torch.preserve_format})),
        (aten.empty.memory_format, lambda t: (([b, m],), like)),
        (aten.full.default, lambda t: (([b, m], 1.5), like)),
        (aten._foreach_mul.Scalar, lambda t: (([t(m), t(n, k)], 2.0), {})),
        (aten._foreach_add_.List, lambda t: (([t(m), t(n)], [t(m), t(n)]), {})),
        (aten.topk.default, lambda t: ((t(m, n + 2), 2), {})),
        (aten.detach.default, lambda t: ((t(m, n),), {})),
        (aten.where.self, lambda t: ((t(m, n, dtype=torch.bool), t(n), t(m, 1)), {})),
        (aten.as_strided.default, lambda t: ((t(m, n), [m], [n], 0), {})),
        (
            aten.convolution.default,
            lambda t: ((t(b, 2, 6, 6), t(m, 2, 3, 3), None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1), {}),
        ),
    ]
    return found


class Counting(FakeTensorMode):
    """Counts the calls that no cache has answered."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def dispatch(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """The call's result."""
        self.calls += 1
        return super().dispatch(func, types, args, kwargs)


def made(call: Call, known: Known, *, seed: int) -> tuple[Any, bool]:
    """All that can be seen of a call's results, and whether the mode was asked for them."""
    func, arguments = call
    mode = Counting()
    chance = random.Random(seed)
    tensors: list[FakeTensor] = []

    def tensor(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        with mode:
            x = torch.empty(*shape, dtype=dtype)
            if len(shape) == 2 and chance.random() < 0.3:
                x = torch.empty(*shape[::-1], dtype=dtype).t()
            elif chance.random() < 0.3:
                x = torch.empty(2, *shape, dtype=dtype)[1]
        tensors.append(x)  # type: ignore[arg-type]
        return x

    args, kwargs = arguments(tensor)
    asked = mode.calls
    out, _, inputs = DispatchCache(mode, known).run(func, (FakeTensor,), args, kwargs)
    return described(out, inputs or []), mode.calls > asked


def described(out: Any, inputs: list[FakeTensor]) -> Any:
    """Structure and, of each tensor, layout, memory, and whose memory it is."""
    leaves, spec = pytree.tree_flatten(out)
    storages = [t.untyped_storage()._cdata for t in (*inputs, *leaves) if isinstance(t, torch.Tensor)]

    def leaf(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        assert isinstance(value, FakeTensor)
        memory = value.untyped_storage()
        return (
            next((i for i, t in enumerate(inputs) if t is value), None),
            storages.index(memory._cdata),
            memory.nbytes(),
            (value.shape, value.stride(), value.storage_offset(), value.dtype, value.fake_device, value.requires_grad),
        )

    return spec, list(map(leaf, leaves))


@pytest.mark.parametrize("seed", range(10))
def test_a_recipe_gives_what_the_operator_gives(seed: int) -> None:
    """320 calls with inputs of random sizes and layouts: by a recipe that another cache has found the results have the same
    structure, layouts, memory and aliases as made anew, and the operator does not run.
    """
    for number, call in enumerate(calls(seed)):
        known, later = Known(), Known()
        anew, asked = made(call, known, seed=number)
        assert asked, call[0]
        later.receive(pickle.loads(pickle.dumps(known.take())))
        assert len(later) == 1, call[0]
        assert made(call, later, seed=number) == (anew, False), call[0]


def test_what_is_not_handed_on() -> None:
    """Under another switch of PyTorch, with another layout or argument, the operator runs; operators that change a tensor's
    shape have no recipe, nor has what holds more than plain data: a generator, or a result of a type of its own.
    """
    known, later = Known(), Known()
    call: Call = (aten.sum.dim_IntList, lambda t: ((t(3, 4), [0]), {}))
    anew = made(call, known, seed=1)[0]
    later.receive(known.take())
    assert known.take() == []
    assert made(call, later, seed=1) == (anew, False)
    with torch.no_grad():
        assert made(call, later, seed=1) == (anew, True)
    assert made((aten.sum.dim_IntList, lambda t: ((t(3, 4), [1]), {})), later, seed=1)[1]
    assert made((aten.sum.dim_IntList, lambda t: ((t(4, 3), [0]), {})), later, seed=1)[1]
    made((aten.native_layer_norm.default, lambda t: ((t(3, 4), [4], t(4), None, 1e-5), {})), known, seed=1)
    made((aten.t_.default, lambda t: ((t(3, 4),), {})), known, seed=1)
    made((aten.rand.generator, lambda t: (([3],), {"generator": torch.Generator(), "device": "cpu"})), known, seed=1)
    assert known.take() == []


def test_names_of_operators() -> None:
    """An operator's own name leads to it; of an operator that this PyTorch does not have, to none."""
    for func in (aten.add.Tensor, aten.mm.default, torch.ops._c10d_functional.wait_tensor.default):
        assert operator_named(func.name()) is func
    assert operator_named("aten::no_such_operator") is operator_named("no_such::thing.out") is None


# ---- sharding decisions --------------------------------------------------------------------------------------------------


@pytest.fixture
def meshes() -> Iterator[tuple[DeviceMesh, DeviceMesh, DeviceMesh]]:
    """Two equal meshes, and one of another shape."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    ranks = torch.arange(4).view(2, 2)
    try:
        yield (
            DeviceMesh("cpu", ranks, mesh_dim_names=("dp", "tp")),
            DeviceMesh("cpu", ranks, mesh_dim_names=("dp", "tp")),
            DeviceMesh("cpu", ranks.t(), mesh_dim_names=("dp", "tp")),
        )
    finally:
        dist.destroy_process_group()


def sharded(mesh: DeviceMesh, shape: tuple[int, ...], *placements: Any) -> DTensorSpec:
    """A tensor over a mesh."""
    stride = torch.empty(shape, device="meta").stride()
    return DTensorSpec(mesh, placements, tensor_meta=TensorMeta(torch.Size(shape), stride, torch.float32))


def schemas(mesh: DeviceMesh) -> list[OpSchema]:
    """Calls with and without redistribution, of lists, of views, with shapes among the arguments."""

    def of(*placements: Any, shape: tuple[int, ...] = (8, 8)) -> DTensorSpec:
        return sharded(mesh, shape, *placements)

    shards, partial = (Shard(0), Shard(1)), (Partial(), Replicate())
    return [
        OpSchema(aten.mm.default, (of(*shards), of(Replicate(), Shard(0))), {}),
        OpSchema(aten.mm.default, (of(*partial), of(Shard(1), Shard(1))), {}),
        OpSchema(aten.add.Tensor, (of(*shards), of(*partial)), {}),
        OpSchema(aten.mul.Tensor, (of(*shards), 2.0), {}),
        OpSchema(aten.view.default, (of(*shards), (4, 2, 8)), {}),
        OpSchema(aten.new_zeros.default, (of(*shards), [8, 4]), {}),
        OpSchema(aten._softmax.default, (of(*shards), -1, False), {}),
        OpSchema(aten._foreach_mul.Scalar, ((of(*shards), of(Replicate(), Shard(0))), 2.0), {}),
        OpSchema(aten.slice.Tensor, (of(*shards), 1, 0, 4), {}),
    ]


def test_a_known_decision_is_that_of_dtensor(meshes: tuple[DeviceMesh, DeviceMesh, DeviceMesh]) -> None:
    """What one process decides about nine calls, another one knows, over its own mesh; over a mesh in which this rank's
    neighbours are others it decides itself. In each case it is what DTensor decides.
    """
    here, alike, other = meshes
    propagator: Any = DTensor._op_dispatcher.sharding_propagator
    asked: list[Any] = []

    def decide(schema: Any) -> Any:
        asked.append(schema)
        return propagator.propagate_op_sharding_non_cached(schema)

    first, later = Decisions(), Decisions()
    for schema in schemas(here):
        first.decide(propagator, decide, schema)
    later.receive(pickle.loads(pickle.dumps(first.take())))
    assert len(asked) == len(later) == 9
    for mesh, count in ((alike, 9), (other, 18)):
        for schema in schemas(mesh):
            found = later.decide(propagator, decide, schema)
            assert found == propagator.propagate_op_sharding_non_cached(schema)
            specs = pytree.tree_leaves(found.output_spec, is_leaf=lambda x: isinstance(x, DTensorSpec))
            assert all(spec.mesh is mesh for spec in specs)
        assert len(asked) == count


def test_decisions_that_hold_more_than_data(meshes: tuple[DeviceMesh, DeviceMesh, DeviceMesh]) -> None:
    """A sharded embedding's partial result keeps a mask between two operators: nobody else gets that decision."""
    propagator: Any = DTensor._op_dispatcher.sharding_propagator
    weight = sharded(meshes[0], (16, 8), Replicate(), Shard(0))
    indices = DTensorSpec(
        meshes[0], (Shard(0), Replicate()), tensor_meta=TensorMeta(torch.Size((4, 4)), (4, 1), torch.int64)
    )
    decisions = Decisions()
    schema = OpSchema(aten.embedding.default, (weight, indices), {})
    found = decisions.decide(propagator, propagator.propagate_op_sharding_non_cached, schema)
    assert type(found.output_spec.placements[1]).__name__ == "_MaskPartial"
    assert decisions.take() == []
