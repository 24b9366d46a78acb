"""A synthetic job whose step is known to the millisecond: layers that are gathered one after the other in the backward.

Every layer's forward is aten.a (2 ms, 1 MiB), aten.b (2.5 ms, 1 MiB) and aten.c (1 ms, the layer's output, 4 KiB); its
backward one operator of 2 ms that reads them. A gather of `gather_ms` for the layer below begins with it, and that layer's
backward waits for the gather. An operator of the optimizer may end the step (`tail_ms`), and the host may wait for it
(`waits`). The host costs nothing and nothing interferes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from autosac.estimator import Pricing
from autosac.plans import Plan
from autosac.runtime_sim import INSTANT_HOST, HostModel, NoInterference, simulate
from autosac.simulation import Simulation, Target
from autosac.trace import (
    Alloc,
    Call,
    Collective,
    Event,
    EventRecord,
    EventWait,
    Free,
    Group,
    HostWait,
    Label,
    ModuleEnter,
    ModuleExit,
    Op,
    Phase,
    Region,
    Signature,
    Storage,
    TensorMeta,
    WorkWait,
)
from simulations import GivenSimulation
from traces import trace_of

MIB = 2**20
BYTES = {"a": MIB, "b": MIB, "c": 4096}
MS = {"a": 2.0, "b": 2.5, "c": 1.0, "backward": 2.0}
META = TensorMeta((4,), (1,), "float32")
SIGNATURES = {name: Signature(f"aten.{name}.default", (META,), (META,)) for name in MS}


class Layers:
    """The step of a number of layers under a policy: by layer the operators that are recomputed, None for no checkpointing."""

    def __init__(
        self,
        count: int,
        gather_ms: float,
        policy: Mapping[int, set[str]],
        tail_ms: float = 0.0,
        slowness: float = 1.0,
        first: int = 0,
        waits: bool = False,
    ) -> None:
        self.slowness = slowness
        self.events: list[Event] = []
        self.ms: list[float] = []
        self.storages: list[Storage] = []
        self.regions: list[Region] = []
        self.made: list[dict[str, int]] = []
        self.policy = policy
        self.gather_ms = gather_ms
        last = self.alloc("c", 0, Phase.FORWARD)
        for layer in range(count):
            last = self.forward(layer, last)
        for layer in reversed(range(count)):
            self.backward(layer)
        self.add(Free(0))
        if tail_ms:
            self.add(Op(list(SIGNATURES).index("c"), 0, 0, Phase.OPTIMIZER, 0, (), ()), tail_ms)
        if waits:
            self.add(HostWait(-1, -1, "device"))
        self.trace = trace_of(
            self.events,
            signatures=SIGNATURES.values(),
            storages=self.storages,
            modules=("", "layers", *(f"layers.{first + layer}" for layer in range(count))),
            groups=(Group.of("dp", range(2)),),
            streams=("compute", "gather"),
            regions=self.regions,
            model="layers",
            world_size=2,
            early_stop=False,
            preserve_rng_state=False,
            checkpointing="plan" if self.policy else "none",
        )

    def add(self, event: Event, ms: float = 0.0) -> None:
        self.events.append(event)
        self.ms.append(ms)

    def alloc(self, name: str, module: int, phase: Phase) -> int:
        self.storages.append(Storage(BYTES[name], 0, Label.NONE, phase, module, 0, f"aten.{name}.default"))
        self.add(Alloc(len(self.storages) - 1))
        return len(self.storages) - 1

    def run(self, name: str, module: int, phase: Phase, inputs: tuple[int, ...], outputs: tuple[int, ...]) -> None:
        self.add(Op(list(SIGNATURES).index(name), 0, module, phase, 0, inputs, outputs), self.slowness * MS[name])

    def forward(self, layer: int, before: int) -> int:
        module, made = layer + 2, {"x": before}
        self.add(ModuleEnter(module, Phase.FORWARD))
        first, calls, read = len(self.events), [], before
        for name in "abc":
            begin = len(self.events)
            made[name] = self.alloc(name, module, Phase.FORWARD)
            self.run(name, module, Phase.FORWARD, (read,), (made[name],))
            calls.append(
                Call(
                    f"aten.{name}.default",
                    0,
                    (META,),
                    begin,
                    len(self.events),
                    False,
                    False,
                    False,
                    (made[name],),
                    (read,),
                    (),
                    (made[name],),
                )
            )
            read = made[name]
        self.regions.append(Region(module, first, len(self.events), tuple(calls), (before,), (read,)))
        for name in self.policy.get(layer, ()):
            if name != "c":
                self.add(Free(made[name]))
        self.add(ModuleExit(module, Phase.FORWARD))
        self.made.append(made)
        return read

    def backward(self, layer: int) -> None:
        module, made = layer + 2, self.made[layer]
        if layer + 1 < len(self.made):
            self.add(WorkWait(layer + 1, 0))
        if layer:
            self.add(EventRecord(layer, 0))
            self.add(EventWait(layer, 1))
            gather = Collective("all_gather", 64, 0, 1, True, layer, -1, -1, -1, module, Phase.BACKWARD, 0, (), ())
            self.add(gather, self.gather_ms)
        for name in sorted(self.policy.get(layer, ())):
            made[name] = self.alloc(name, module, Phase.RECOMPUTE) if name != "c" else made[name]
            self.run(name, module, Phase.RECOMPUTE, (), (made[name],))
        self.run("backward", module, Phase.BACKWARD, (made["a"], made["b"], made["x"]), ())
        for name in "cba":
            self.add(Free(made[name]))


class Job:
    """The layers as captures: `observed`, and `under` a plan. `stage` is the rank that is planned for, of equal ones.

    `rank`: its number, where it is executed with others; `slowness`: of its computation.
    """

    def __init__(
        self,
        count: int = 4,
        gather_ms: float = 5.0,
        host: HostModel = INSTANT_HOST,
        tail_ms: float = 0.0,
        ranks: int = 1,
        stage: int = 0,
        rank: int = 0,
        slowness: float = 1.0,
        waits: bool = False,
    ) -> None:
        self.waits = waits
        self.rank, self.slowness, self.first = rank, slowness, rank * count
        self.count, self.gather_ms, self.host, self.tail_ms = count, gather_ms, host, tail_ms
        self.ranks, self.stage = ranks, stage
        self.captured = 0

    def simulated(self, policy: Mapping[int, set[str]], selective: tuple[str, ...] = ()) -> Simulation:
        """The step under a policy."""
        layers = Layers(self.count, self.gather_ms, policy, self.tail_ms, self.slowness, self.first, self.waits)
        pricing = Pricing(
            event_ms=np.array(layers.ms),
            source=("given",),
            event_source=np.zeros(len(layers.ms), dtype=np.int16),
            event_rel_std=np.zeros(len(layers.ms), dtype=np.float32),
        )
        timeline = simulate(
            [
                replace(layers.trace, info=replace(layers.trace.info, rank=self.rank + rank))
                for rank in range(self.ranks)
            ],
            [pricing] * self.ranks,
            host=self.host,
            overlap=NoInterference(),
            selective_modules=selective,
            steps=2,
        )
        return GivenSimulation(
            trace=replace(layers.trace, info=replace(layers.trace.info, rank=self.rank)),
            target=replace(Target.of("h100-sxm-80gb", 2), host=self.host, overlap=NoInterference()),
            selective_modules=selective,
            stage=self.stage,
            other_prices=pricing,
            given_timeline=timeline,
        )

    def observed(self) -> Simulation:
        """Without checkpointing."""
        return self.simulated({})

    def baselines(self) -> dict[str, Simulation]:
        """The step without checkpointing only."""
        return {"none": self.observed()}

    def failures(self) -> dict[str, str]:
        """None."""
        return {}

    def stopping_early(self) -> Simulation | None:
        """There is no other step."""
        return None

    def begin(self, plan: Plan, *, ahead: bool = False) -> None:
        """Nothing goes on beside the planning."""

    def sample(self, plan: Plan, _: int | None) -> Callable[[], Simulation]:
        """Of all layers."""
        return lambda: self.under(plan)

    def is_derived(self, _: Simulation) -> bool:
        """All steps are made here, at the cost of a derived one."""
        return True

    def derived(self, plan: Plan) -> Simulation:
        """Under a plan."""
        return self.under(plan)

    def under(self, plan: Plan) -> Simulation:
        """Under a plan."""
        self.captured += 1
        # The output is held as it is: aten.c never runs again.
        policy = {
            int(u.fqn[7:]) - self.first: {d.op.split(".")[1] for d in u.decisions if not d.keep} - {"c"}
            for u in plan.units
        }
        return self.simulated(policy, tuple(u.fqn for u in plan.units))

    begin_template, template = begin, under


@pytest.fixture(scope="session")
def make_job() -> Callable[..., Any]:
    """Makes the synthetic job."""
    return Job
