"""Whether a plan has the optimizer work in slices."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import autosac
from autosac.errors import CaptureError, InfeasibleError
from autosac.limits import OPTIMIZER_SLICE_BYTES
from autosac.planning.closed_loop import Planned
from autosac.planning.optimizer_slices import in_slices, temporary_bytes
from autosac.plans import Plan, Prediction, Settings
from autosac.trace import Op, Phase, Signature, TensorMeta, Trace
from plans import MADE_FOR
from traces import trace_of

MIB = 2**20


def planned(step_ms: float, *, recompute_ms: float = 1.0, outside: str = "optimizer", slices: int = 0) -> Planned:
    """A plan with this step time, whose memory peaks there."""
    one = Prediction(
        step_ms=step_ms, peak_active_bytes=1, peak_reserved_bytes=None, fits=True, recompute_ms=recompute_ms
    )
    settings = Settings(optimizer_slice_bytes=slices)
    plan = Plan(made_for=MADE_FOR, units=(), settings=settings, predictions={"autosac": one, "none": one})
    memory = SimpleNamespace(peak=lambda: SimpleNamespace(outside=outside))
    simulation: Any = SimpleNamespace(trace=trace_of(), memory=memory)
    return Planned(plan=plan, simulation=simulation, notes=())


def step_of(*sizes_mib: int, name: str = "aten._foreach_sqrt.default", phase: Phase = Phase.OPTIMIZER) -> Trace:
    """A step in which one operator returns tensors of these sizes."""
    metas = tuple(TensorMeta((size * MIB // 4,), (1,), "float32") for size in sizes_mib)
    signature = Signature(name, (), metas)
    op = Op(0, 0, 0, phase, 0, (), tuple(range(len(sizes_mib))))
    return trace_of([op], signatures=[signature], modules=[""])


def own() -> dict[str, Prediction]:
    """None is shown beside."""
    return {}


class Captures:
    """Of a step, and of the same in slices."""

    def __init__(self, *steps: Trace) -> None:
        self._steps = steps

    def observed(self) -> Any:
        """The step."""
        return SimpleNamespace(trace=self._steps[0])

    def sliced(self) -> Captures:
        """With the next one."""
        return Captures(*self._steps[1:])


def never(_: Sequence[Captures]) -> tuple[Planned, ...]:
    """For where nothing is to be planned."""
    raise AssertionError


LARGE, SMALL = step_of(1024), step_of(256)


@pytest.mark.parametrize(
    ("step", "found"),
    [
        (step_of(256, 256, 1), 513),
        (step_of(256, 256, 1, phase=Phase.BACKWARD), 0),
        (step_of(256, 256, 1, name="aten.sqrt.default"), 0),
        (trace_of(), 0),
    ],
)
def test_what_functions_for_lists_return(step: Trace, found: int) -> None:
    """All tensors of one call, in the optimizer; nothing else counts."""
    assert temporary_bytes(step) == found * MIB


def test_the_shorter_step_of_each_budget() -> None:
    """Where the step with slices is shorter, or the only one, it is the plan; else the note tells what they would give."""
    plain = (planned(9.0), planned(8.0), InfeasibleError("no", peak_in="optimizer"))
    other = tuple(planned(ms, slices=OPTIMIZER_SLICE_BYTES) for ms in (7.0, 8.5, 20.0))
    first, second, third = in_slices(plain, [Captures(LARGE, SMALL)], lambda _: other, own)
    assert isinstance(first, Planned) and first.plan.settings.optimizer_slice_bytes == 256 * MIB
    assert (
        "256.0 MiB of the parameters at a time, which changes no number: the step is 2.0 ms shorter" in first.notes[-1]
    )
    assert isinstance(second, Planned) and not second.plan.settings.optimizer_slice_bytes
    assert second.notes[-1] == "with the optimizer in slices of 256.0 MiB the step would take 0.5 ms longer"
    assert isinstance(third, Planned) and third.notes[-1].endswith("; without that no plan would fit")


@pytest.mark.parametrize(
    ("result", "steps"),
    [
        (planned(9.0, recompute_ms=0.0), (LARGE, SMALL)),
        (planned(9.0, outside=""), (LARGE, SMALL)),
        (InfeasibleError("no"), (LARGE, SMALL)),
        (InfeasibleError("", peak_in="loss"), (LARGE, SMALL)),
        (planned(9.0), (step_of(256, 256), SMALL)),
        (planned(9.0), (LARGE, LARGE)),
    ],
)
def test_nothing_is_planned_where_nothing_can_be_gained(
    result: Planned | InfeasibleError, steps: tuple[Trace, ...]
) -> None:
    """A plan that recomputes nothing, a peak elsewhere, temporaries of two slices, and an optimizer that cannot be divided."""
    assert in_slices((result,), [Captures(*steps)], never, own) == (result,)


def test_what_cannot_gain_is_left_as_it_is() -> None:
    """Of two budgets the one that gains nothing has no note; where the step with slices cannot be captured, none has."""
    plain = (planned(9.0), planned(8.0, recompute_ms=0.0))
    first, second = in_slices(plain, [Captures(LARGE, SMALL)], lambda _: (planned(7.0), planned(8.0)), own)
    assert isinstance(first, Planned) and first.notes and second is plain[1]

    class Failing(Captures):
        def sliced(self) -> Failing:
            return Failing()

        def observed(self) -> Any:
            if not self._steps:
                raise CaptureError("no")
            return super().observed()

    assert in_slices(plain, [Failing(LARGE)], never, own) == plain


def test_neither_fits() -> None:
    """The error is that of the step with slices, which needs less."""
    refused = (InfeasibleError("no plan meets 9 GiB: it needs 15", peak_in="optimizer"),)
    less = (InfeasibleError("no plan meets 9 GiB: it needs 12", peak_in="loss"),)
    (found,) = in_slices(refused, [Captures(LARGE, SMALL)], lambda _: less, own)
    assert isinstance(found, InfeasibleError) and found.peak_in == "loss"
    assert str(found) == "with the optimizer in slices of 256.0 MiB no plan meets 9 GiB: it needs 12"


def make_step(
    device: torch.device, *, optimizer_of: Callable[..., torch.optim.Optimizer] = torch.optim.AdamW
) -> tuple[nn.Module, Any]:
    """Six layers of 8,192 x 8,192 (1.5 GiB in single precision), and few rows."""
    with torch.device(device):
        model = nn.Sequential(*(nn.Sequential(nn.Linear(8192, 8192), nn.GELU()) for _ in range(6)))
    optimizer = optimizer_of(model.parameters())
    rows = torch.randn(1024, 8192, device=device)

    def step() -> None:
        model(rows).pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return model, step


@pytest.mark.capture
def test_a_step_that_peaks_in_its_optimizer_fits_with_slices() -> None:
    """Parameters, gradients and two states take 4 x 1.5 GiB and the square roots 1.5 more, or 0.25 in slices of one layer.
    The batch, a workspace and the biases take less than 0.1.
    """
    plan = autosac.plan(make_step, gpu="h100-sxm-80gb", budget="6.9GiB", budget_kind="active")
    assert plan.settings.optimizer_slice_bytes == OPTIMIZER_SLICE_BYTES
    assert plan.predictions["none"].peak_active_bytes > 7.5 * 2**30
    assert 6.25 * 2**30 < plan.predictions["autosac"].peak_active_bytes < 6.35 * 2**30
    assert "in slices of 256.0 MiB" in str(plan)
    with pytest.raises(InfeasibleError, match=r"with the optimizer in slices of 256.0 MiB no plan meets 6.00 GiB"):
        autosac.plan(make_step, gpu="h100-sxm-80gb", budget="6GiB", budget_kind="active")


@pytest.mark.capture
def test_an_optimizer_that_cannot_be_divided() -> None:
    """Adafactor puts slices together again: the error is that of the step as it is, and says nothing of slices."""
    factored = partial(make_step, optimizer_of=partial(torch.optim.Adafactor, foreach=True))
    with pytest.raises(InfeasibleError, match=r"^no plan meets 3.50 GiB active: .* in the optimizer of the step$"):
        autosac.plan(factored, gpu="h100-sxm-80gb", budget="3.5GiB", budget_kind="active")
