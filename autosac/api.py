"""AutoSAC from Python, for any eager PyTorch training step.

    def make_step(device):
        model = Model().to(device)
        optimizer = torch.optim.AdamW(model.parameters())
        batch = torch.randint(0, 1000, (8, 1024), device=device)

        def step():
            model(batch).loss.backward()
            optimizer.step()
            optimizer.zero_grad()

        return model, step

    simulation = autosac.simulate(make_step, gpu="h100-sxm-80gb")
    plan = autosac.plan(make_step, gpu="h100-sxm-80gb", budget="60GiB")
    model = autosac.apply(model, plan)

`make_step` is called in a child process, on a device that stands for the GPU: nothing real is allocated.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from autosac.errors import InfeasibleError
from autosac.files.temporary import temporary_folder
from autosac.planning.closed_loop import Goal, full_plan, make_plan, make_plans
from autosac.planning.confidence import confidence_of
from autosac.plans import Plan
from autosac.quantities import parse_budget
from autosac.simulation import Simulation, Target, simulation_of

if TYPE_CHECKING:
    from torch import nn

    from autosac.capture.jobs.eager import MakeStep


def simulate(
    make_step: MakeStep,
    *,
    gpu: str = "h100-sxm-80gb",
    target: str = "gpu",
    steps: int = 2,
    plan: Plan | None = None,
    allocator: str = "",
) -> Simulation:
    """Simulate a training step: its memory over time, its step time, and whether it fits.

    `gpu`: a known GPU or a profile file. `target`: "gpu", or "cpu" to record the operators that this machine's CPU would
    run (memory is then that of the CPU's operators). `steps`: how many are run, the last is kept. `plan`: apply it first
    (make_step has to return the model too). `allocator`: a PYTORCH_CUDA_ALLOC_CONF string.

    UsageError for wrong arguments, CaptureError if the step cannot be captured.
    """
    machine = Target.of(gpu, 1, allocator=allocator)
    captures = EagerCaptures(make_step, machine, target=target, steps=steps)
    return captures.under(plan) if plan is not None else captures.plain()


def plan(
    make_step: MakeStep,
    *,
    gpu: str = "h100-sxm-80gb",
    budget: str = "85%",
    budget_kind: str = "reserved",
    confidence: float | None = None,
    solver: str = "pareto",
    offload: bool = False,
    allocator: str = "",
    target: str = "gpu",
    progress: Callable[[str], None] = lambda _: None,
) -> Plan:
    """Decide what to keep and what to recompute so that the step fits the budget and runs as fast as it can.

    `budget`: "68GiB", "73GB" or "85%" of the GPU; `budget_kind`: "reserved" (what the caching allocator takes) or
    "active" (what tensors occupy); `confidence`: the probability with which the plan has to fit (see
    `autosac.planning.confidence`); `solver`: "pareto", "ilp", "greedy" or "knapsack"; `offload`: allow
    offloading activations to host memory where that makes the step shorter. The rest as in `simulate`.

    InfeasibleError if no plan meets the budget: it says the smallest that would do.
    """
    machine = Target.of(gpu, 1, allocator=allocator)
    goal = Goal(
        budget_bytes=parse_budget(budget, machine.hardware.usable_bytes),
        budget_kind=budget_kind,
        solver=solver,
        offload=offload,
    )
    captures = EagerCaptures(make_step, machine, target=target)
    if confidence is None:
        return make_plan(captures, goal, progress).plan
    wanted = confidence_of(confidence, budget_kind, machine.allocator)
    (result,) = make_plans(captures, goal, (wanted.inner_bytes(goal.budget_bytes),), progress)
    planned = wanted.certain(result, goal.budget_bytes)
    if isinstance(planned, InfeasibleError):
        raise planned
    return planned.plan


def apply(model: nn.Module, plan: Plan) -> nn.Module:
    """Checkpoint the model's modules as the plan says; the model is changed in place and returned.

    Call it before torch.compile and before fully_shard. PlanError if the plan was made for another model.
    """
    from autosac.integrations.apply import apply as apply_to

    return apply_to(model, plan)


class EagerCaptures:
    """The captures that planning needs, of an eager step; see `autosac.planning.closed_loop.Captures`."""

    def __init__(self, make_step: MakeStep, machine: Target, *, target: str = "gpu", steps: int = 2) -> None:
        self._make_step = make_step
        self._machine = machine
        self._settings: dict[str, Any] = {"gpu": machine.gpu, "target": target, "steps": steps}
        self._observed: Simulation | None = None
        self._baselines: dict[str, Simulation] = {}

    def plain(self) -> Simulation:
        """The step as it is."""
        return self._capture()

    def observed(self) -> Simulation:
        """The step with its regions observed."""
        if self._observed is None:
            self._observed = self._capture(observe=True)
        return self._observed

    def baselines(self) -> Mapping[str, Simulation]:
        """The step without checkpointing, and with everything recomputed that may be."""
        if not self._baselines:
            self._baselines = {"none": self.observed(), "full": self.under(full_plan(self.observed()))}
        return self._baselines

    def failures(self) -> Mapping[str, str]:
        """None: both baselines are of the model's own making."""
        return {}

    def begin(self, plan: Plan) -> None:
        """Nothing: the step is captured in this process."""

    def under(self, plan: Plan) -> Simulation:
        """The step under a plan."""
        with temporary_folder() as folder:
            path = folder / "plan.json"
            plan.save(path)
            return self._capture(plan=plan, plan_file=str(path))

    def _capture(self, plan: Plan | None = None, **changes: Any) -> Simulation:
        from autosac.capture.jobs.eager import EagerRequest, capture_eager

        trace = capture_eager(self._make_step, EagerRequest(**self._settings, **changes))
        return simulation_of(trace, self._machine, plan)
