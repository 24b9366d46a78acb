"""Small real models, and plans for them made from what `observe` sees, without any capture."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._functorch import config
from torch.distributed.device_mesh import init_device_mesh
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from autosac.integrations.observe import observe
from autosac.integrations.operators.effects import written_arguments
from autosac.integrations.operators.keys import is_counted, is_random, op_name, output_metadata
from autosac.integrations.operators.modules import find_module, parameters_of
from autosac.integrations.recompute.entries import Observer, observer
from autosac.plans import GRAPH, Decision, OutputMetadata, Plan, Settings, Unit
from benchmarks.fuzz.blocks import GptBlock, LlamaBlock
from benchmarks.fuzz.groups import groups_of
from plans import MADE_FOR


class InplaceBlock(nn.Module):
    """In-place activations, a view that is changed in place, a value read before a change, several outputs, a
    list.
    """

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(dim, 2 * dim), nn.Linear(2 * dim, dim)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The block's output."""
        h = self.up(x)
        h.relu_()
        scale = torch.zeros(h.shape[-1])
        scale += 0.5
        first, second = scale.chunk(2)
        early = (first * 3).detach()
        second.mul_(2)
        values, _ = h.max(dim=-1, keepdim=True)
        y = h * scale
        y[..., :3].sigmoid_()
        parts = torch.split(y, h.shape[-1] // 2, dim=-1)
        return x + self.down(torch.cat([parts[1] * early.sum(), parts[0]], dim=-1)) + values


class Stack(nn.Module):
    """Blocks under ``layers`` with an embedding and a head outside of them."""

    def __init__(self, make: Callable[[], nn.Module], depth: int, dim: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(31, dim)
        self.layers = nn.ModuleList([make() for _ in range(depth)])
        self.head = nn.Linear(dim, 31)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """The logits."""
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


MODELS: dict[str, Callable[[], Stack]] = {
    "llama": lambda: Stack(lambda: LlamaBlock(16, 2), 2, 16),
    "gpt": lambda: Stack(lambda: GptBlock(8), 2, 8),
    "inplace": lambda: Stack(lambda: InplaceBlock(8), 2, 8),
}


@dataclass
class Seen:
    """One operator (that is no view) as `observe` reports it, with the addresses of its storages for as long as `references`
    live.
    """

    op: str
    occurrence: int
    outputs: OutputMetadata
    random: bool
    reads: set[int]
    writes: set[int]
    made: set[int]


class Calls(list[Seen]):
    """What one execution of a module ran; what autograd still holds of it at its end, as (storage, how many calls
    came before it was saved); and the storages that it returns.
    """

    def __init__(self) -> None:
        super().__init__()
        self.saved: list[tuple[int, int]] = []
        self.returned: set[int] = set()


@dataclass
class Log:
    """A recorder: what the last execution of each module ran."""

    calls: dict[str, Calls] = field(default_factory=dict)
    begun: list[str] = field(default_factory=list)
    references: list[StorageWeakRef] = field(default_factory=list)
    running: list[Region] = field(default_factory=list)

    def begin(self, fqn: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Region:
        """A forward begins."""
        self.begun.append(fqn)
        self.calls[fqn] = Calls()
        self.running.append(Region(self, self.calls[fqn]))
        return self.running[-1]

    def pack(self, tensor: torch.Tensor) -> _Saved:
        """Autograd saves a tensor."""
        saved = _Saved(tensor)
        for region in self.running:
            region.packed.append((weakref.ref(saved), *self.addresses(tensor), len(region.calls)))
        return saved

    def addresses(self, tree: Any) -> set[int]:
        """The storages of a tree's tensors."""
        found = set()
        for leaf in tree_leaves(tree):
            if isinstance(leaf, torch.Tensor):
                storage = leaf.untyped_storage()
                self.references.append(StorageWeakRef(storage))
                found.add(storage._cdata)
        return found


class _Saved:
    """A tensor that autograd saved, which lives as long as autograd can ask for it."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor


@dataclass
class Region:
    """One execution's recorder."""

    log: Log
    calls: Calls
    open: int = 0
    graphs: int = 0
    changed: int = 0
    ended: bool = False
    packed: list[tuple[Any, int, int]] = field(default_factory=list)

    def op_begin(self) -> None:
        """An operator begins."""
        self.open += 1

    def op_end(
        self, op: str, occurrence: int, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any
    ) -> None:
        """It ends."""
        self.open -= 1
        if occurrence < 0:
            return  # a view, about which nothing is decided
        written = [args[i] if i < len(args) else kwargs.get(name) for i, name in written_arguments(func)]
        see = self.log.addresses
        random = is_random(func, args, kwargs)
        self.calls.append(
            Seen(op, occurrence, output_metadata(out), random, see((args, kwargs)), see(written), see(out))
        )

    def graph_end(self, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any, changed: Any) -> None:
        """A compiled graph, which began as an operator does, ends."""
        self.open -= 1
        see = self.log.addresses
        metadata = output_metadata(out)
        self.calls.append(Seen(GRAPH, self.graphs, metadata, False, see((args, kwargs)), see(list(changed)), see(out)))
        self.graphs += 1
        self.changed += len(changed)

    def end(self, out: Any) -> None:
        """The forward ends."""
        assert self.open == 0
        self.ended = True
        self.log.running.remove(self)
        self.calls.saved = [(storage, before) for saved, storage, before in self.packed if saved() is not None]
        self.calls.returned = self.log.addresses(out)


def must_run(calls: Calls, keep: Collection[int]) -> list[int]:
    """Positions of the calls that have to run again in the backward if these are kept.

    A storage's content is told by its last writer. What autograd asks for is there already if it came from outside,
    is returned, or is changed later (autograd holds it then). Anything else has to be made, unless its last content
    is kept, from what its writer read.
    """
    writers: dict[int, list[int]] = {}
    before: list[dict[int, int]] = []  # how many writers each storage had when a call began
    for i, call in enumerate(calls):
        for storage in call.reads:
            writers.setdefault(storage, [-1])
        before.append({storage: len(found) for storage, found in writers.items()})
        for storage in call.writes | (call.made - writers.keys()):
            writers.setdefault(storage, []).append(i)
    needed: set[int] = set()
    waiting: list[tuple[int, int]] = []

    def ask(storage: int, count: int) -> None:
        found = writers.get(storage, [-1])
        maker = found[count - 1]
        if found[0] == -1 or maker in needed or (count == len(found) and maker in keep):
            return
        needed.add(maker)
        waiting.extend((read, before[maker][read]) for read in calls[maker].reads)

    for storage, position in calls.saved:
        found = writers.get(storage, [-1])
        if storage not in calls.returned and all(writer < position for writer in found):
            ask(storage, len(found))
    while waiting:
        ask(*waiting.pop())
    return sorted(needed)


def observed(model: nn.Module, fqns: Collection[str], run: Callable[[nn.Module], Any]) -> dict[str, Calls]:
    """What the modules run in `run(model)`; the model itself is not touched."""
    log = Log()
    with torch.autograd.graph.saved_tensors_hooks(log.pack, lambda saved: saved.tensor):
        run(observe(copy.deepcopy(model), fqns, log))
    return log.calls


def decisions_from(calls: list[Seen], keep: Collection[int]) -> tuple[Decision, ...]:
    """The decisions that keep the calls at these positions."""
    return tuple(
        Decision(op=c.op, occurrence=c.occurrence, keep=i in keep, outputs=c.outputs) for i, c in enumerate(calls)
    )


def plan_for(
    model: nn.Module, decisions: dict[str, tuple[Decision, ...]], world_size: int = 1, **settings: int
) -> Plan:
    """A plan with these decisions for this model."""
    units = []
    for fqn, rows in decisions.items():
        module = find_module(model, fqn)
        assert module is not None
        units.append(
            Unit(
                fqn=fqn,
                discard_fraction=0.5,
                kept_bytes=0,
                recompute_ms=0.0,
                decisions=rows,
                parameters=parameters_of(module),
            )
        )
    made_for = replace(
        MADE_FOR, torchtitan_version="0.2.2", gpu="cpu", world_size=world_size, parameters=parameters_of(model)
    )
    return Plan(made_for=made_for, units=tuple(units), settings=Settings(**settings))


def plan_keeping(
    model: nn.Module, run: Callable[[nn.Module], Any], keep: dict[str, Any], **settings: bool
) -> tuple[Plan, dict[str, list[str]]]:
    """A plan for units by name, and what has to run again under it. `keep`: positions, or operators by name."""
    calls = observed(model, list(keep), run)
    rows, again = {}, {}
    for fqn, chosen in keep.items():
        positions = {i for i, call in enumerate(calls[fqn]) if i in chosen or call.op in chosen}
        rows[fqn] = decisions_from(calls[fqn], positions)
        again[fqn] = [calls[fqn][i].op for i in must_run(calls[fqn], positions)]
    return plan_for(model, rows, **settings), again


def step(model: nn.Module, tokens: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Loss and all gradients of one seeded training step."""
    torch.manual_seed(1)
    model.zero_grad()
    loss = F.cross_entropy(model(tokens).flatten(0, 1), tokens.roll(-1, 1).flatten())
    loss.backward()
    return (loss.detach(), *(p.grad for p in model.parameters() if p.grad is not None))


def same(a: tuple[torch.Tensor, ...], b: tuple[torch.Tensor, ...]) -> bool:
    """Bitwise equality of two results."""
    return len(a) == len(b) and all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


@dataclass
class Ran:
    """Operators that really run in the forwards of modules, and again in their backwards, by module."""

    forward: dict[str, list[str]]
    again: dict[str, list[str]]


class _Count(TorchDispatchMode, Observer):
    """Sees every operator; `inside` are the lists of those that are running at present."""

    def __init__(self, ran: Ran) -> None:
        super().__init__()
        self.inside: list[list[str]] = []
        self._seen = ran

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.inside and is_counted(func):
            self.inside[-1].append(op_name(func))
        return func(*args, **(kwargs or {}))

    def begin(self, fqn: str, forward: int) -> None:
        """A recomputation begins."""
        self.inside.append(self._seen.again[fqn])

    def end(self) -> None:
        """It has ended."""
        self.inside.pop()


@contextmanager
def counting(model: nn.Module, fqns: Collection[str]) -> Iterator[Ran]:
    """Operators that really run in the forwards of these modules, and in the recomputations of units."""
    ran = Ran({fqn: [] for fqn in fqns}, {fqn: [] for fqn in fqns})
    count = _Count(ran)
    handles = []
    for fqn in fqns:
        module = find_module(model, fqn)
        assert module is not None
        handles.append(module.register_forward_pre_hook(lambda *_, fqn=fqn: count.inside.append(ran.forward[fqn])))
        handles.append(module.register_forward_hook(lambda *_: count.inside.pop() and None, always_call=True))
    previous, observer[0] = observer[0], count
    try:
        with count:
            yield ran
    finally:
        observer[0] = previous
        for handle in handles:
            handle.remove()


@dataclass(frozen=True)
class Case:
    """A model with its batch, its result without checkpointing, and what its layers run."""

    name: str
    model: Stack
    tokens: torch.Tensor
    reference: tuple[torch.Tensor, ...]
    calls: dict[str, Calls]

    def plan(self, keep: Collection[int] | Callable[[Seen], bool], **settings: bool) -> Plan:
        """A plan that keeps, in every layer, the calls at these positions or those the function chooses."""
        chosen = {
            fqn: {i for i, call in enumerate(calls) if (keep(call) if callable(keep) else i in keep)}
            for fqn, calls in self.calls.items()
        }
        return plan_for(
            self.model, {fqn: decisions_from(self.calls[fqn], chosen[fqn]) for fqn in self.calls}, **settings
        )


def make_case(name: str) -> Case:
    """The case of this name."""
    torch.manual_seed(0)
    model = MODELS[name]()
    tokens = torch.randint(0, 31, (2, 5))
    calls = observed(model, ["layers.0", "layers.1"], lambda m: m(tokens))
    return Case(name, model, tokens, step(copy.deepcopy(model), tokens), calls)


class Lab:
    """The helpers above, for tests."""

    Log = Log
    Stack = Stack
    groups_of = staticmethod(groups_of)
    observed = staticmethod(observed)
    decisions_from = staticmethod(decisions_from)
    plan_for = staticmethod(plan_for)
    step = staticmethod(step)
    same = staticmethod(same)
    counting = staticmethod(counting)
    must_run = staticmethod(must_run)
    plan_keeping = staticmethod(plan_keeping)


@pytest.fixture
def fresh_compiler() -> Iterator[None]:
    """No compiled code and no settings of the partitioner (which plans for the compiler set) from, or for, other tests."""
    torch._dynamo.reset()
    with config.patch(config.get_config_copy()):
        yield
    torch._dynamo.reset()


@pytest.fixture(scope="session")
def lab() -> type[Lab]:
    """The helpers of this folder's tests."""
    return Lab


@pytest.fixture(scope="session")
def cases() -> dict[str, Case]:
    """All small models."""
    return {name: make_case(name) for name in MODELS}


@pytest.fixture(params=list(MODELS), scope="session")
def case(request: pytest.FixtureRequest, cases: dict[str, Case]) -> Case:
    """Each small model in turn."""
    return cases[request.param]


@pytest.fixture
def mesh() -> Iterator[Any]:
    """A mesh of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what makes plans of compiled modules."""
    for item in items:
        if "compiled" in item.nodeid and item.path.parent == Path(__file__).parent:
            item.add_marker("compiled_plan")
