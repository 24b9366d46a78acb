"""One trial: a job without a plan and the same job under one, step by step, compared bitwise.

Both jobs are built from the same seeds and trained for one to three steps with an optimizer; some steps have another number of
rows or run under autocast, some jobs are in double precision. After every step losses, gradients, parameters, buffers, random
generators and Python state have to be equal (`benchmarks.fuzz.snapshot`). The outcomes:

- ``right``, and ``warned``: right, with a warning that the plan did not fit;
- ``refused``: `autosac.plan`, `Plan.load` or `autosac.apply` raised an error of AutoSAC's that names the place on one line;
- ``stopped``: a step raised an AutosacError or RuntimeError that names the module or operator on one line, and the optimizer
  has not used anything of that step;
- ``wrong``: something differs; the detail says what, by kind;
- ``obscure``: any other exception, a hang, or the end of the process;
- ``no reference``: the job itself, without a plan, raises an error or is not deterministic.

The number of a trial decides everything about it. By its remainder by four its plan is one of the planner (0), legal (1, 2) or
hostile (3); see `benchmarks.fuzz.plans`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import random
import re
import signal
import traceback
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

import autosac
from autosac.plans import Decision
from benchmarks.fuzz import plans
from benchmarks.fuzz.family import FAMILIES, ROWS, Family, Job
from benchmarks.fuzz.observing import observe
from benchmarks.fuzz.snapshot import Snapshot, bare, frozen, snapshot

OUTCOMES = ("right", "warned", "refused", "stopped", "wrong", "obscure", "no reference")
KINDS = ("planner", "legal", "legal", "hostile")
PLANNING_LIMIT_S = 180.0
NUMBERS_PER_SEED = 1_000_000  # of trials of one family: the first of seed s is s times as many
# What another order of sums changes, as a share of the largest element.
_IN_FLOAT32, _IN_BFLOAT16 = 1e-4, 2e-2
_LINE_OF_CODE = re.compile(r"\(at \S+\.py:\d+")
_OPERATOR = re.compile(r"\b[a-z]\w*\.\w+\.[a-zA-Z_]\w*\b")

Apply = Callable[[nn.Module, autosac.Plan], nn.Module]
Differs = Callable[[Snapshot, Snapshot], tuple[str, str] | None]


@dataclass(frozen=True)
class Outcome:
    """How a trial ended, and in words what was found. `trace`: the traceback of the exception, if there was one."""

    kind: str
    detail: str = ""
    trace: str = ""
    plan_kind: str = ""
    seconds: float = 0.0


class TimedOut(BaseException):
    """A part of a trial took too long."""


@dataclass
class Course:
    """What a trial does: `variant` of the family, rows and autocast of every step, optimizer, double precision."""

    number: int
    variant: int
    plan_kind: str
    optimizer: str
    steps: tuple[tuple[int, bool], ...]
    double: bool
    rng: random.Random


@dataclass
class Session:
    """What trials of one process share: the planner's plans, and operators that were observed."""

    planner: plans.Planner | None = None
    apply: Apply = autosac.apply
    observed: dict[tuple[str, int, bool], plans.Calls] = field(default_factory=dict)

    def foreign(self) -> list[Decision]:
        """The decisions for a block of another model."""
        calls = self.calls(FAMILIES["gpt"], Course(0, 0, "legal", "sgd", (), False, random.Random(0)))
        return list(plans.decide(next(iter(calls.values())), range(0, 1000, 2)))

    def calls(self, family: Family, course: Course) -> plans.Calls:
        """What the units of the course's variant run, without a compiler."""
        family = family.base or family
        key = (family.name, course.variant, course.double)
        if key not in self.observed:
            job = _job(family, course)
            found = observe(bare(job.model), job.units)
            seed(course.number)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                job.step(job.transform(job.model), _batch(job, course, ROWS))
            self.observed[key] = found
        return self.observed[key]


def course_of(family: Family, number: int, optimizers: tuple[str, ...] = ("sgd", "adam")) -> Course:
    """What the number of a trial means."""
    rng = random.Random(f"{family.name}:{number}")
    kind = KINDS[number % 4]
    if kind == "planner" and not family.planner:
        kind = "legal"
    variant = number // NUMBERS_PER_SEED % 6 if kind == "planner" else rng.randrange(family.variants)
    steps = [
        (ROWS if i == 0 or rng.random() < 0.5 else -rng.randrange(1000), rng.random() < 0.06)
        for i in range(rng.choice((1, 2, 3)))
    ]
    if rng.random() < 0.1:
        steps[0] = (-rng.randrange(1000), False)
    return Course(number, variant, kind, rng.choice(optimizers), tuple(steps), rng.random() < 0.06, rng)


def seed(number: int) -> None:
    """Seed all global generators."""
    torch.manual_seed(number)
    random.seed(number)
    np.random.seed(number % 2**32)  # noqa: NPY002


def _job(family: Family, course: Course) -> Job:
    seed(course.number)
    job = family.build(random.Random(course.variant))
    if course.double and job.double:
        job.model.double()
    return job


def _batch(job: Job, course: Course, rows: int) -> Any:
    batch = job.batch(job.rows[-rows % len(job.rows)] if rows <= 0 else rows)
    return tree_map(_in_double, batch) if course.double and job.double else batch


def _in_double(leaf: Any) -> Any:
    if isinstance(leaf, Tensor) and leaf.is_floating_point():
        return leaf.detach().double().requires_grad_(leaf.requires_grad)
    return leaf


class StepError(Exception):
    """A step raised `error`; `before`: the parameters had not been changed since the last complete step."""

    def __init__(self, error: Exception, untouched: bool, place: str) -> None:
        super().__init__(str(error))
        self.error, self.untouched, self.place = error, untouched, place


def play(job: Job, model: nn.Module, course: Course) -> Iterator[Snapshot]:
    """Train; what can be seen after each step. StepError if one raises."""
    model = job.transform(model)
    optimizer = _optimizer(model, course.optimizer if course.optimizer in job.optimizers else job.optimizers[0])
    for i, (rows, autocast) in enumerate(course.steps):
        seed(course.number * 7 + i)
        before = [frozen(p) for p in model.parameters()]
        place = "forward or backward"
        try:
            batch = _batch(job, course, rows)
            context: Any = torch.autocast("cpu", torch.bfloat16) if autocast else contextlib.nullcontext()
            with context:
                losses = job.step(model, batch)
            place = "optimizer"
            optimizer.step()
            place = "after the step"
            seen = snapshot(model, batch, losses, job.state(model))
        except Exception as e:
            raise StepError(e, before == [frozen(p) for p in model.parameters()], place) from e
        optimizer.zero_grad()
        yield seen


def _optimizer(model: nn.Module, name: str) -> torch.optim.Optimizer:
    parameters = [p for p in model.parameters() if p.requires_grad] or [nn.Parameter(torch.zeros(1))]
    if name == "adam":
        return torch.optim.Adam(parameters, lr=0.01, foreach=False)
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9 if name == "sgd" else 0.0, foreach=False)


# ---- the trial ---------------------------------------------------------------------------------------------


def trial(family: Family, number: int, session: Session) -> Outcome:
    """Run one trial. It does not raise, but for KeyboardInterrupt."""
    course = course_of(family, number)
    with _limit(family.limit_s) as rearm, _tidy():
        try:
            return dataclasses.replace(_trial(family, course, session, rearm), plan_kind=course.plan_kind)
        except TimedOut:
            return Outcome(
                "obscure", "the trial did not end within its time limit", traceback.format_exc(), course.plan_kind
            )


def _trial(family: Family, course: Course, session: Session, rearm: Callable[[float], None]) -> Outcome:
    job = _job(family, course)
    rearm(PLANNING_LIMIT_S if course.plan_kind == "planner" else family.limit_s)
    plan, unplanned = _attempt(lambda: _plan(family, course, session, job))
    rearm(family.limit_s)
    expected, failed = _reference(family, course)
    if plan is None:
        assert unplanned is not None
        if failed is not None:
            return Outcome("no reference", str(failed))
        return (
            _refusal(unplanned, job, "plan")
            if isinstance(unplanned, autosac.AutosacError)
            else _obscure("plan", unplanned)
        )
    if isinstance(plan, str):
        return _no_plan(plan, job) if failed is None else Outcome("no reference", str(failed))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        outcome = _under(plan, job, course, session, expected, failed)
    if outcome.kind == "wrong" and family.ranks == 1 and _undetermined(family, course, expected):
        return Outcome("no reference", "two runs without a plan differ")
    tolerance = _IN_BFLOAT16 if any(autocast for _, autocast in course.steps) else _IN_FLOAT32
    near = partial(Snapshot.distance, tolerance=tolerance)
    if outcome.kind == "wrong" and family.rounds:
        outcome = _under(plan, _job(family, course), course, session, expected, failed, near)
    if outcome.kind == "wrong" and family.compiled:
        outcome = _against_uncompiled(plan, family, course, session, expected, near) or outcome
    if outcome.kind == "right" and any(w.category.__name__ == "PlanMismatchWarning" for w in caught):
        message = next(str(w.message) for w in caught if w.category.__name__ == "PlanMismatchWarning")
        return Outcome("warned", message)
    return outcome


def _attempt(make: Callable[[], autosac.Plan | str]) -> tuple[autosac.Plan | str | None, Exception | None]:
    try:
        return make(), None
    except Exception as e:
        return None, e


def _reference(family: Family, course: Course) -> tuple[list[Snapshot], Exception | None]:
    seen: list[Snapshot] = []
    try:
        job = _job(family, course)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for one in play(job, job.model, course):
                seen.append(one)
    except Exception as e:
        return seen, e
    return seen, None


def _undetermined(family: Family, course: Course, expected: list[Snapshot]) -> bool:
    again, failed = _reference(family, course)
    return failed is not None or any(a.difference(b) for a, b in zip(expected, again, strict=True))


def _against_uncompiled(
    plan: autosac.Plan, family: Family, course: Course, session: Session, compiled: list[Snapshot], near: Differs
) -> Outcome | None:
    """The job under the plan against the job that is not compiled; None if the compiler alone changes nothing.

    Units that Dynamo cannot compile in one piece run uncompiled under a plan, and a compiler may round otherwise. Others of
    its results are wrong: gradients in torch 2.13 where a buffer is read and then changed, and numbers from generators that
    modules own. If the plan's result is neither of the two then, there is no reference.
    """
    uncompiled = family.base or dataclasses.replace(family, build=lambda rng: _uncompiled(family.build(rng)))
    expected, failed = _reference(uncompiled, course)
    if failed is not None or not any(a.difference(b) for a, b in zip(compiled, expected, strict=True)):
        return None
    outcome = _under(plan, _job(family, course), course, session, expected, None, near)
    if outcome.kind != "wrong":
        return outcome
    if any(near(a, b) for a, b in zip(compiled, expected, strict=True)):
        return Outcome("no reference", "compiled without a plan, the job computes something else than uncompiled")
    return None


def _uncompiled(job: Job) -> Job:
    job.transform = lambda model: model
    return job


def _plan(family: Family, course: Course, session: Session, job: Job) -> autosac.Plan | str:
    if course.plan_kind == "planner":
        if session.planner is None:
            raise ValueError("this session has no planner")
        return session.planner.plan(family, course.variant, course.rng.randrange(len(plans.FRACTIONS)))
    calls = session.calls(family, course)
    if course.plan_kind == "legal":
        plan = plans.legal(job, calls, course.rng)
    else:
        plan = plans.hostile(job, calls, course.rng, session.foreign())
    return plan if family.base is None else plans.for_compiler(plan, job, course.rng)


def _under(
    plan: autosac.Plan,
    job: Job,
    course: Course,
    session: Session,
    expected: list[Snapshot],
    failed: Exception | None,
    differs: Differs = Snapshot.difference,
) -> Outcome:
    """The job under the plan, compared with what was expected."""
    names = [unit.fqn for unit in plan.units] + [name for name, _ in bare(job.model).named_modules() if name]
    names += [name for name, _ in bare(job.model).named_parameters()]
    seed(course.number)
    try:
        model = session.apply(job.model, plan)
    except autosac.AutosacError as e:
        return _refusal(e, job, "apply", names)
    except Exception as e:
        return _obscure("apply", e) if failed is None else Outcome("no reference", str(failed))
    steps = play(job, model, course)
    for i, before in enumerate(expected):
        try:
            after = next(steps)
        except StepError as e:
            return _stopped(e, names, i)
        except Exception as e:
            return _obscure(f"before step {i}", e)
        found = differs(before, after)
        if found is not None:
            return Outcome("wrong", f"{found[0]}: {found[1]} (step {i} of {len(course.steps)})")
    if failed is not None:
        with contextlib.suppress(Exception):
            next(steps)
        return Outcome("no reference", f"{type(failed).__name__}: {failed}")
    return Outcome("right")


def _refusal(e: autosac.AutosacError, job: Job, stage: str, names: list[str] | None = None) -> Outcome:
    known = names or [name for name, _ in job.model.named_modules() if name]
    kind = "refused" if _clear(str(e), known) else "obscure"
    return Outcome(kind, f"{stage}: {type(e).__name__}: {e}", "".join(traceback.format_exception(e)))


def _no_plan(message: str, job: Job) -> Outcome:
    known = [name for name, _ in job.model.named_modules() if name]
    clear = not message.startswith(plans.UNCLEAR) and _clear(message, known)
    return Outcome("refused" if clear else "obscure", f"plan: {message}")


def _stopped(e: StepError, names: list[str], step: int) -> Outcome:
    trace = "".join(traceback.format_exception(e.error))
    where = f"step {step}: {type(e.error).__name__}: {e.error}"
    if not e.untouched:
        return Outcome("wrong", f"parameter: changed by the optimizer before {where}", trace)
    clear = isinstance(e.error, autosac.AutosacError | RuntimeError) and any(
        _clear(text, names) for text in _told(e.error)
    )
    return Outcome("stopped" if clear and e.place == "forward or backward" else "obscure", where, trace)


def _told(error: BaseException) -> Iterator[str]:
    """What the error says, and the notes that it carries; or the first line of AutoSAC's own error, to which the compiler has
    added lines in its own.
    """
    yield str(error)
    yield from getattr(error, "__notes__", ())
    inner = getattr(error, "inner_exception", None)
    if isinstance(inner, autosac.AutosacError):
        yield str(inner).split("\n")[0]


def _obscure(stage: str, e: Exception) -> Outcome:
    return Outcome("obscure", f"{stage}: {type(e).__name__}: {e}", "".join(traceback.format_exception(e)))


def _clear(message: str, names: list[str]) -> bool:
    """Whether the message is one line that names a module, a parameter, an operator, or a line of the user's code."""
    if not message.strip() or "\n" in message.strip():
        return False
    return bool(_OPERATOR.search(message) or _LINE_OF_CODE.search(message)) or any(
        re.search(rf"(?<![\w.]){re.escape(name)}(?!\w)", message) for name in names
    )


@contextlib.contextmanager
def _limit(seconds: float) -> Iterator[Callable[[float], None]]:
    """TimedOut if the block computes for longer; the function that is given starts the time anew.

    What waits for ever is noticed by the parent (`benchmarks.fuzz.run`), so that a busy machine makes no trial obscure.
    """

    def handler(*_: Any) -> None:
        raise TimedOut

    old = signal.signal(signal.SIGPROF, handler)

    def rearm(seconds: float) -> None:
        signal.setitimer(signal.ITIMER_PROF, seconds)

    rearm(seconds)
    try:
        yield rearm
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, old)


@contextlib.contextmanager
def _tidy() -> Iterator[None]:
    """Global settings as they were, whatever a trial leaves."""
    grad, dtype = torch.is_grad_enabled(), torch.get_default_dtype()
    try:
        yield
    finally:
        torch.set_grad_enabled(grad)
        torch.set_default_dtype(dtype)
        if torch.distributed.is_initialized() and torch.distributed.get_world_size() == 1:
            torch.distributed.destroy_process_group()
