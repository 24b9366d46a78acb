"""How FSDP handles parameters, read from steps that are written by hand."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from autosac.configurations.bounds.sharding import NOTHING_KNOWN, Sharding, sharding_of
from autosac.estimator import Pricing
from autosac.simulation import Simulation, Target
from autosac.trace import Collective, Group, Label, Op, Phase
from traces import TraceBuilder

GATHER, REDUCE = 1, 2  # streams
LAYERS = ("layers.0", "layers.1")
MODULES = ("", "layers", *LAYERS, "layers.0.moe", "layers.1.moe", "head")
# Of every copy: from the message of the first layer, of the second one, of the head; their gradients to messages.
COPIES_MS = (0.002, 0.003, 0.5, 0.004, 0.008, 0.5)


class Step(TraceBuilder):
    """Two layers and a head, each with a message of its own."""

    def __init__(self, *, together: bool, reduced_on: int = REDUCE, waits: bool = False) -> None:
        super().__init__(MODULES, ())
        self.operators_ms: list[float] = []
        copies = iter(COPIES_MS)
        sizes = {"layers.0": 1000, "layers.1": 2000, "head": 10}
        held: list[int] = []
        for module, nbytes in sizes.items():
            self.module, self.stream = module, GATHER
            message = self.alloc(nbytes)
            self.transfer("all_gather", nbytes, outputs=(message,))
            self.copied("aten.split_with_sizes_copy.default", next(copies))
            self.copied("aten.mm.default", 7.0)  # no copy
            held.append(message)
            if not together:
                self.free(held.pop())
        self.free(*held)
        self.phase = Phase.BACKWARD
        before: int | None = None
        for module, nbytes in sizes.items():
            self.module, self.stream = module, 0
            parameter = self.alloc(nbytes, Label.UNSHARDED_PARAMETER)
            self.stream = REDUCE
            message = self.alloc(2 * nbytes)
            self.stream = reduced_on
            shard = self.alloc(nbytes // 4)
            if before is not None:
                self.free(before)
            if not waits:
                self.free(message)
            self.free(parameter)
            before = message if waits else None
            self.transfer("reduce_scatter", 2 * nbytes, inputs=(message,), outputs=(shard,))
            self.copied("fsdp.chunk_cat.default", next(copies))
            self.copied("fsdp.all_gather_copy_in.default", 9.0)  # another kind

    def transfer(self, kind: str, nbytes: int, inputs: Sequence[int] = (), outputs: Sequence[int] = ()) -> None:
        """A transfer of FSDP's, on a stream of its own, and one of the model's, which does not count."""
        stream = GATHER if kind == "all_gather" else REDUCE
        self.op("c10d", (), ())
        self.operators_ms += [0.0]
        signature, module = len(self.signatures) - 1, self.modules.index(self.module)
        common = (0, False, -1, -1, -1, signature, module, self.phase, -1)
        for on, size in ((stream, nbytes), (0, 5)):
            group, *rest = common
            self.add(Collective(kind, size, group, on, *rest, tuple(inputs), tuple(outputs)))  # type: ignore[arg-type]

    def copied(self, name: str, ms: float) -> None:
        """An operator on the model's stream that takes so long, and the same on another one."""
        for stream, taken in ((0, ms), (GATHER, 100.0)):
            self.stream = stream
            self.op(name)
            self.operators_ms.append(taken)

    def read(self, units: Sequence[str] = LAYERS, layers: Sequence[str] = LAYERS) -> Sharding:
        """What is read from it. `units`: those of FSDP."""
        trace = self.build(fsdp_units=("", *units, "head"))
        trace = replace(trace, groups=(Group("0", 0, ((8, 1),)),))
        ms = np.zeros(len(self.events))
        ms[[i for i, event in enumerate(self.events) if type(event) is Op]] = self.operators_ms
        nobody = np.full(len(ms), -1, np.int16)
        prices = Pricing(event_ms=ms, source=(), event_source=nobody, event_rel_std=np.zeros(len(ms), np.float32))
        simulation = Simulation(trace=trace, target=Target.of("h100-sxm-80gb", 8), other_prices=prices)
        return sharding_of(simulation, [self.modules.index(name) for name in layers])


class ExpertsStep(Step):
    """Two layers, each with a message of its experts, which it issues itself, or the first one before it runs."""

    def __init__(self, *, ahead: bool, stream: int = GATHER) -> None:
        TraceBuilder.__init__(self, MODULES, ())
        self.operators_ms: list[float] = []
        held: dict[str, int] = {}
        for module in LAYERS:
            for issued in LAYERS if ahead and module == "layers.0" else () if ahead else (module,):
                self.module, self.stream = module, stream
                held[issued] = self.alloc(500)
                self.transfer("all_gather", 500, outputs=(held[issued],))
            self.operator("fsdp.split_with_sizes_copy.default", module)  # FSDP's, before the layer runs
            self.operator("aten.mm.default", f"{module}.moe")  # the router
            self.operator("fsdp.split_with_sizes_copy.default", f"{module}.moe", (held[module],))
            self.free(held.pop(module))
        self.phase = Phase.BACKWARD
        self.module, self.stream = LAYERS[1], REDUCE
        message = self.alloc(1000)
        self.transfer("reduce_scatter", 1000, inputs=(message,), outputs=(message,))

    def operator(self, name: str, module: str, inputs: Sequence[int] = ()) -> None:
        """Of the model's stream."""
        self.module, self.stream = module, 0
        self.op(name, inputs)
        self.operators_ms.append(1.0)


def test_messages_of_experts_are_there_together_where_they_come_ahead() -> None:
    """Before the first layer runs, both layers' are there; issued by their own layers, one at a time; on the model's own
    stream they are not apart.
    """
    assert ExpertsStep(ahead=True).read((*LAYERS, "layers.0.moe", "layers.1.moe")).inner_at_once == 2
    assert ExpertsStep(ahead=False).read((*LAYERS, "layers.0.moe", "layers.1.moe")).inner_at_once == 1
    assert ExpertsStep(ahead=True, stream=0).read((*LAYERS, "layers.0.moe", "layers.1.moe")).inner_at_once == 0


def test_what_a_step_says_of_its_messages() -> None:
    """The first layer's 1,000 bytes are copied in 2 us, the second's 2,000 in 3: 1.5 ns a byte at least; of gradients, with
    messages twice as large, 4 and 8 us: 2 ns. Three messages at once count as two, which is all that bounds need.
    """
    assert Step(together=True).read() == Sharding(
        gathers_at_once=2,
        gradients_apart=True,
        scatter_waits=False,
        gather_ns=pytest.approx(1.5),
        scatter_ns=pytest.approx(2.0),
        gathered_bytes=1000,
    )


def test_messages_one_after_the_other() -> None:
    """Each is freed before the next one comes."""
    assert Step(together=False).read().gathers_at_once == 1


def test_gradients_on_the_stream_of_the_model() -> None:
    """Their shards are not apart."""
    assert not Step(together=True, reduced_on=0).read().gradients_apart


def test_a_message_that_waits_until_the_parameters_are_freed() -> None:
    """The one of the group before, or the own one, is still there as the first layer's backward ends."""
    assert Step(together=True, waits=True).read().scatter_waits


@pytest.mark.parametrize("inner", ["layers.0.moe", "layers.0.moe.experts"])
def test_parts_of_layers_with_messages_of_their_own(inner: str) -> None:
    """What a layer's own message takes is not known then; what streams hold is."""
    found = Step(together=True).read((*LAYERS, inner))
    assert found == Sharding(gathers_at_once=2, gradients_apart=True)


def test_steps_without_layers_that_are_sharded() -> None:
    """Nothing is known of them: messages of the head alone say nothing of layers."""
    assert Step(together=True).read(layers=("layers",)) == NOTHING_KNOWN
