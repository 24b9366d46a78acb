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
from autosac.quantities import parse_budget, parse_bytes
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

    Args:
        make_step: called with a device; returns a function that runs one step, or the model and that function.
        gpu: the name of a known GPU (``autosac gpus`` lists them) or the path of a profile.
        target: "gpu", or "cpu" to record the operators that this machine's CPU would run. Memory is then that of the CPU's
            operators.
        steps: number of steps to run. The last one is simulated; the first creates the optimizer's states.
        plan: a plan to apply first. `make_step` has to return the model, too.
        allocator: the job's PYTORCH_CUDA_ALLOC_CONF.

    Returns:
        The simulated step. Its times are in ms, its memory in bytes.

    Raises:
        UsageError: an argument is wrong.
        CaptureError: the step cannot be captured.
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
    curve: str = "staircase",
    offload: bool = False,
    allocator: str = "",
    target: str = "gpu",
    progress: Callable[[str], None] = lambda _: None,
) -> Plan:
    """Decide what to keep and what to recompute so that the step fits the budget and runs as fast as it can.

    Args:
        make_step: called with a device; returns the model and a function that runs one step.
        gpu: the name of a known GPU (``autosac gpus`` lists them) or the path of a profile.
        budget: memory that the GPU may use: "68GiB", "73GB", or a share of the GPU such as "85%".
        budget_kind: what the budget limits: "reserved" (memory that the caching allocator reserves) or "active" (memory of
            tensors).
        confidence: probability that the plan fits, such as 0.99; None: no margin for prediction errors.
        solver: solver that chooses operators within a module: "pareto", "ilp", "greedy" or "knapsack".
        curve: how the MILP models the trade-off of time against memory: "staircase" or "pwlf".
        offload: allow offloading activations to host memory where that makes the step shorter.
        allocator: the job's PYTORCH_CUDA_ALLOC_CONF.
        target: "gpu" or "cpu", as in `simulate`.
        progress: called with a line of text that says what is being done.

    Returns:
        A verified plan. Its predictions come from a simulation of the step under the plan.

    Raises:
        UsageError: an argument is wrong.
        CaptureError: the step cannot be captured.
        InfeasibleError: no plan meets the budget. The message says the smallest budget that would do.
    """
    machine = Target.of(gpu, 1, allocator=allocator)
    goal = Goal(
        budget_bytes=parse_budget(budget, machine.hardware.usable_bytes),
        budget_kind=budget_kind,
        solver=solver,
        curve=curve,
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
    """Make the model follow the plan. Call it before ``torch.compile`` and before ``fully_shard``.

    Args:
        model: the real model; it is changed in place.
        plan: a plan for a model of the same structure.

    Returns:
        The same model.

    Raises:
        PlanError: the plan was made for another model, or a module of it is compiled or checkpointed already.
    """
    from autosac.integrations.apply import apply as apply_to

    return apply_to(model, plan)


def compile_options(budget: str) -> dict[str, Any]:
    """Options for ``torch.compile`` that limit what each compiled graph saves between its forward and its backward.

        model = torch.compile(model, options=autosac.compile_options("8GiB"))

    PyTorch's partitioner decides, as with its own ``activation_memory_budget``, but the budget is in bytes and is kept: a
    larger one never saves less. It is for the backend "inductor", and for a model that no plan is applied to. What is alive
    without being saved (parameters, inputs, outputs) does not count.

    Args:
        budget: such as "8GiB" or "500MB".

    Returns:
        What `torch.compile` takes as ``options``.

    Raises:
        UsageError: the budget is wrong.
    """
    from autosac.integrations.compile_budget import BudgetPartitioner

    return {"custom_partitioner_fn": BudgetPartitioner(parse_bytes(budget))}


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
