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

`make_step` is called in a child process, with a device that stands for the GPU. Tensors on it take no memory.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, overload

from autosac.errors import InfeasibleError, UsageError
from autosac.limits import OPTIMIZER_SLICE_BYTES
from autosac.planning.closed_loop import Goal, Planned, make_plans, predictions_of
from autosac.planning.confidence import confidence_of
from autosac.planning.loss_chunks import chunks_of, competing
from autosac.planning.optimizer_slices import in_slices
from autosac.planning.step_captures import StepCaptures
from autosac.plans import Plan, Prediction
from autosac.quantities import parse_budget, parse_bytes
from autosac.simulation import Simulation, Target, simulation_of

if TYPE_CHECKING:
    from torch import nn

    from autosac.capture.jobs.eager import EagerRequest, MakeStep
    from autosac.capture.jobs.step_process import StepProcess
    from autosac.configurations.eager import EagerResult
    from autosac.configurations.found.results import SearchResult
    from autosac.configurations.space.offers import Objective, Offer
    from autosac.configurations.space.request import SearchRequest

Progress = Callable[[str], None]


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
        target: "gpu", or "cpu" to simulate the operators that this machine's CPU would run, with their memory.
        steps: number of steps to capture, at least 2. The last one is simulated; the first creates the optimizer's states.
        plan: a plan to apply to the model first. `make_step` then has to return the model, too.
        allocator: the job's PYTORCH_CUDA_ALLOC_CONF.

    Returns:
        The simulated step. Its times are in ms, its memory in bytes.

    Raises:
        HardwareError: the GPU is unknown, or its profile is wrong.
        PlanError: the plan was made for another model.
        UsageError: another argument is wrong.
        CaptureError: the step cannot be captured.
    """
    machine = Target.of(gpu, 1, allocator=allocator)
    captures = EagerCaptures(make_step, machine, target=target, steps=steps)
    return captures.under(plan) if plan is not None else captures.plain()


def plan(
    make_step: MakeStep,
    *,
    gpu: str = "h100-sxm-80gb",
    budget: str | float = "85%",
    budget_kind: str = "reserved",
    confidence: float | None = None,
    solver: str = "pareto",
    curve: str = "staircase",
    offload: bool = False,
    chunk_loss: bool = False,
    allocator: str = "",
    target: str = "gpu",
    progress: Progress = lambda _: None,
) -> Plan:
    """Decide what to keep and what to recompute, so that the step fits the budget and runs as fast as possible.

    Args:
        make_step: called with a device; returns the model and a function that runs one step.
        gpu: the name of a known GPU (``autosac gpus`` lists them) or the path of a profile.
        budget: memory that the GPU may use: "68GiB", "73GB", or a share of the GPU such as "85%" or
            0.85; an int is a number of bytes.
        budget_kind: what the budget limits: "reserved" (memory that the caching allocator reserves) or "active" (memory of
            tensors).
        confidence: probability that the plan fits, such as 0.99; None: no margin for prediction errors.
        solver: solver that chooses operators within a module: "pareto", "ilp", "greedy" or "knapsack".
        curve: how the MILP models the trade-off of time against memory: "staircase" or "pwlf".
        offload: allow offloading activations to host memory where that makes the step shorter.
        chunk_loss: allow computing losses made by `chunked_loss` in chunks of rows where that makes the step shorter.
        allocator: the job's PYTORCH_CUDA_ALLOC_CONF.
        target: "gpu" or "cpu", as in `simulate`.
        progress: called with a line of text that says what AutoSAC is doing.

    Returns:
        A verified plan. Its predictions come from a simulation of the step under the plan.

    Raises:
        HardwareError: the GPU is unknown, or its profile is wrong.
        UsageError: another argument is wrong.
        CaptureError: the step cannot be captured.
        InfeasibleError: no plan meets the budget. The message says how large the budget must be.
    """
    machine = Target.of(gpu, 1, allocator=allocator)
    goal = Goal(
        budget_bytes=parse_budget(budget, machine.hardware.usable_bytes),
        budget_kind=budget_kind,
        solver=solver,
        curve=curve,
        offload=offload,
    )
    wanted = None if confidence is None else confidence_of(confidence, budget_kind, machine.allocator)
    inner_bytes = goal.budget_bytes if wanted is None else wanted.inner_bytes(goal.budget_bytes)

    def results(captures: Sequence[EagerCaptures]) -> tuple[Planned | InfeasibleError, ...]:
        found = make_plans(captures[0], goal, (inner_bytes,), progress)
        return found if wanted is None else tuple(wanted.certain(result, goal.budget_bytes) for result in found)

    with EagerCaptures(make_step, machine, target=target) as captures:

        def baselines() -> dict[str, Prediction]:
            return predictions_of(captures.baselines())

        (planned,) = in_slices(results([captures]), [captures], results, baselines)
        if chunk_loss:
            chunks = chunks_of(captures.observed().trace)
            chunked = [captures.with_loss_in(chunks)]
            (planned,) = competing(
                (planned,), chunks, lambda: in_slices(results(chunked), chunked, results, baselines), baselines
            )
    if isinstance(planned, InfeasibleError):
        raise planned
    return planned.plan


def summary(result: Simulation | Plan) -> str:
    """The report of a simulation or of a plan that the command line prints, as text.

        print(autosac.summary(autosac.simulate(make_step)))

    Args:
        result: what `simulate` or `plan` has returned, or a plan that was loaded.

    Returns:
        Lines of at most $COLUMNS characters, or of 80.
    """
    from autosac.report.summaries import plan_summary, simulation_summary, text_of

    if isinstance(result, Plan):
        return text_of(plan_summary(result))
    return text_of(simulation_summary(result, result.trace.info.model))


@overload
def search(job: SearchRequest, *, progress: Progress = ...) -> SearchResult: ...


@overload
def search(
    job: str | PathLike[str], *, gpu: str = ..., world_size: int = ..., progress: Progress = ..., **values: Any
) -> SearchResult: ...


@overload
def search(
    job: Callable[..., MakeStep],
    *,
    space: Mapping[str, Sequence[Any]],
    gpu: str = ...,
    offers: Sequence[Offer] = ...,
    objective: Objective = ...,
    budget: str | float = ...,
    work: Callable[[Mapping[str, Any]], float] = ...,
    progress: Progress = ...,
) -> EagerResult: ...


def search(
    job: SearchRequest | str | PathLike[str] | Callable[..., MakeStep], **options: Any
) -> SearchResult | EagerResult:
    """Find the fastest configuration: of a TorchTitan job, or of an eager step over settings of your own.

        autosac.search("job.toml", gpu="h100-sxm-80gb", world_size=8, output="best.toml")

    Args:
        job: what ``autosac search`` takes, as a `SearchRequest`, or its job alone; or a function that is called with settings
            by name and returns what `simulate` calls `make_step`.
        **options: ``progress``, which is called with a line of text that says what is being done. Of a job alone also the
            other values of a `SearchRequest`, and ``gpu`` and ``world_size`` in place of ``offers``. Of an eager step also
            ``space``: the values of each of its settings, all combinations of which are searched; ``gpu`` and ``budget``:
            as in `plan`; ``offers``, in place of ``gpu``, and ``objective``: as in a `SearchRequest`; ``work``: how much
            work a step with these settings does (default: their ``batch_size``, else 1), of which the most in a second
            wins.

    Returns:
        Rows, best first, and `best`. Rows of a job name its layout, checkpointing and prediction; those of an eager step its
        settings, simulation and plan.

    Raises:
        HardwareError: the GPU is unknown, or its profile is wrong.
        UsageError: another argument is wrong, or no configuration of the space is legal.
        CaptureError: the job cannot be captured.
    """
    from autosac.configurations.space.request import SearchRequest
    from autosac.report.search_files import completed_search

    if isinstance(job, (str, PathLike)):
        told = {"progress": options.pop("progress")} if "progress" in options else {}
        job, options = SearchRequest.of(job, **options), told
    if isinstance(job, SearchRequest):
        result, _ = completed_search(job, **options)
        return result
    if not callable(job):
        raise UsageError(
            f"search: {job!r} is neither a SearchRequest, nor a job, nor a function; give SearchRequest(job=..., offers=...)"
        )
    return _search_of_steps(job, **options)


def _search_of_steps(
    make: Callable[..., MakeStep],
    *,
    space: Mapping[str, Sequence[Any]] | None = None,
    gpu: str = "h100-sxm-80gb",
    offers: Sequence[Offer] = (),
    objective: Objective = "tokens-per-second",
    budget: str | float = "85%",
    work: Callable[[Mapping[str, Any]], float] = lambda settings: settings.get("batch_size", 1),
    progress: Progress = lambda _: None,
) -> EagerResult:
    """See `search`."""
    from autosac.configurations.eager import Choice, EagerSearch, combinations
    from autosac.configurations.space.offers import Offer, check_offers

    if not space:
        raise UsageError("space: name the settings to search and their values, such as {'batch_size': [1, 2, 4]}")
    offers = tuple(offers) or (Offer(gpu=gpu),)
    check_offers(offers, objective)
    if any(offer.world_size > 1 for offer in offers):
        raise UsageError("offers: an eager step runs on one GPU; leave out world_size")
    machines = {offer: Target.of(offer.gpu, 1) for offer in offers}

    def goal(offer: Offer) -> Goal:
        return Goal(budget_bytes=parse_budget(budget, machines[offer].hardware.usable_bytes))

    def captures(choice: Choice) -> EagerCaptures:
        return EagerCaptures(make(**choice.settings), machines[choice.offer])

    choices = [Choice(settings=settings, offer=offer) for offer in offers for settings in combinations(space)]
    return EagerSearch(choices, captures, work, goal, progress, objective).run()


def apply(model: nn.Module, plan: Plan | str | PathLike[str]) -> nn.Module:
    """Make the model follow the plan. Call this before ``torch.compile`` and before ``fully_shard``.

    Args:
        model: the real model. It is changed in place. If the plan says so, optimizers of this process work in slices from now
            on, which changes no number.
        plan: a plan for a model of the same structure, or the path of its file.

    Returns:
        The same model.

    Raises:
        PlanError: the file is not a plan, the plan was made for another model, or one of its modules is already compiled or
            checkpointed.
    """
    from autosac.integrations.apply import apply as apply_to

    return apply_to(model, plan if isinstance(plan, Plan) else Plan.load(Path(plan)))


def observe(
    model: nn.Module, output: str | PathLike[str], *, plan: Plan | None = None, steps: int = 3, warm_up: int = 2
) -> None:
    """Measure the first steps of training, and write their time and memory beside the plan's predictions.

    Call this before the first step. A step ends with the step of an optimizer of the model. ``autosac calibrate CAPTURE
    --from-run FILE`` makes a corrected profile from the file. CAPTURE is the step as written by ``simulation.trace.save`` or
    ``autosac run --save-capture``.

    Args:
        model: the model that is trained. It is not changed.
        output: the file to write (JSON; times in ms, memory in bytes).
        plan: the plan that the model follows, if any.
        steps: number of steps to measure.
        warm_up: number of steps before them, at least 1.

    Raises:
        UsageError: `steps` or `warm_up` is below 1, or the file cannot be written.
    """
    from autosac.files.writing import check_output
    from autosac.integrations.first_steps import FirstSteps
    from autosac.runs import RunRecord

    if steps < 1 or warm_up < 1:
        raise UsageError(f"steps ({steps}) and warm_up ({warm_up}) must be at least 1")
    path = Path(output)
    check_output(path)
    observed = FirstSteps(lambda found: RunRecord.of_steps(found, plan=plan).save(path), warm_up=warm_up, steps=steps)
    observed.add(model)


def compile_options(budget: str | int) -> dict[str, Any]:
    """Options for ``torch.compile`` that limit what each compiled graph saves between its forward and its backward.

        model = torch.compile(model, options=autosac.compile_options("8GiB"))

    PyTorch's partitioner decides, as with its own ``activation_memory_budget``. But here the budget is in bytes, and a graph
    with a larger budget never saves less. A graph that cannot meet the budget gives a warning. Parameters, inputs and outputs
    do not count. Use it with the backend "inductor" and a model without a plan.

    Args:
        budget: bytes that each compiled graph may save, such as "8GiB" or "500MB"; an int is a number of bytes.

    Returns:
        The argument ``options`` of `torch.compile`.

    Raises:
        UsageError: the budget is not an amount of bytes. (A model follows a plan by `apply`.)
    """
    from autosac.integrations.compile_budget import BudgetPartitioner

    if isinstance(budget, Plan):
        raise UsageError("compile_options takes bytes; for a plan call autosac.apply(model, plan) before torch.compile")
    return {"custom_partitioner_fn": BudgetPartitioner(parse_bytes(budget))}


class EagerCaptures(StepCaptures):
    """The captures that planning needs, of an eager step, in children of this process.

    Inside of ``with``, those of a step that compiles something share a process (`step_process`), which ends with it.
    """

    def __init__(
        self, make_step: MakeStep, machine: Target, *, target: str = "gpu", steps: int = 2, **settings: Any
    ) -> None:
        """`settings`: others of `autosac.capture.jobs.eager.EagerRequest`."""
        super().__init__()
        self._make_step = make_step
        self._machine = machine
        self._settings: dict[str, Any] = {"target": target, "steps": steps, **settings}
        self._process: StepProcess[EagerRequest] | None = None
        self._scope: ExitStack | None = None

    def __enter__(self) -> EagerCaptures:
        self._scope = ExitStack()
        return self

    def __exit__(self, *_: object) -> None:
        scope, self._scope, self._process = self._scope, None, None
        if scope is not None:
            scope.close()

    def with_loss_in(self, chunks: int) -> EagerCaptures:
        """Captures of the same step with its chunked losses in this many chunks."""
        return self._with(loss_chunks=chunks)

    def sliced(self) -> EagerCaptures:
        """See `StepCaptures.sliced`."""
        return self._with(optimizer_slice_bytes=OPTIMIZER_SLICE_BYTES)

    def _with(self, **settings: Any) -> EagerCaptures:
        others = EagerCaptures(self._make_step, self._machine, **{**self._settings, **settings})
        return self._scope.enter_context(others) if self._scope is not None else others

    def _capture(self, plan: Plan | None = None, **changes: Any) -> Simulation:
        from autosac.capture.jobs.eager import EagerRequest, capture_eager, step_process

        request = EagerRequest(gpu=self._machine.gpu, **self._settings, **changes)
        trace = capture_eager(self._make_step, request, self._process)
        if self._scope is not None and self._process is None and trace.info.compiled and request.target == "gpu":
            self._process = step_process(self._make_step, request.gpu)
            self._scope.callback(self._process.close)
        return simulation_of(trace, self._machine, plan)
