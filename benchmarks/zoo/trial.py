"""One model of the zoo: its step, its plan at the smallest budget, and real training with and without the plan."""

from __future__ import annotations

import os
import random
import re
import tomllib
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

import numpy as np
import torch
import transformers

import autosac
from autosac.quantities import parse_bytes

_ROWS, _LENGTH, _SAMPLES = 32, 32, 800
_STEPS = 2
_SMALLEST = re.compile(r"smallest budget found to work is ([0-9.]+ [KMG]iB)")
_ROUNDED = 1.005  # budgets in messages are rounded


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """A class of models with a configuration. `input`: tokens, images or sound."""

    name: str
    model: str
    configuration: str
    input: str
    settings: Mapping[str, Any]

    @property
    def is_known(self) -> bool:
        """Whether the installed transformers have it."""
        return hasattr(transformers, self.model) and hasattr(transformers, self.configuration)


def kinds() -> list[Kind]:
    """All kinds of `models.toml`."""
    with Path(__file__).with_name("models.toml").open("rb") as file:
        return [Kind(name=name, **row) for name, row in tomllib.load(file).items()]


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What became of a trial. `result`: right, warned, wrong, refused or no reference; `detail` says where or why.

    `share`: the plan's peak of active memory as a share of that without checkpointing. `units`: modules that it checkpoints.
    """

    kind: Kind
    result: str
    share: float | None = None
    units: int = 0
    detail: str = ""


def trial(kind: Kind, *, autocast: bool = False) -> Outcome:
    """Train a model without a plan and under one for the smallest budget, and compare bit for bit."""
    make_step = partial(_make_step, kind, autocast)
    try:
        expected = _trained(kind, autocast, None)
        if _differs(expected, _trained(kind, autocast, None)):
            return Outcome(kind=kind, result="no reference", detail="two trainings without a plan differ")
    except Exception as e:
        return Outcome(kind=kind, result="no reference", detail=_line(e))
    try:
        without = autosac.simulate(make_step, target="cpu").peak_active_bytes
        plan = _smallest_plan(make_step, without)
        peak_bytes = plan.predictions["autosac"].peak_active_bytes
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            found = _trained(kind, autocast, plan)
    except autosac.AutosacError as e:
        return Outcome(kind=kind, result="refused", detail=_line(e))
    mismatches = [str(w.message) for w in said if w.category.__name__ == "PlanMismatchWarning"]
    wrong = _differs(expected, found)
    return Outcome(
        kind=kind,
        result="wrong" if wrong else "warned" if mismatches else "right",
        share=peak_bytes / without,
        units=len(plan.units),
        detail=wrong or (mismatches[0].partition(" (gradients")[0] if mismatches else ""),
    )


def _smallest_plan(make_step: Any, without: int) -> autosac.Plan:
    """The plan for the smallest budget, which a refusal names."""
    planned = partial(autosac.plan, make_step, budget_kind="active", target="cpu")
    try:
        return planned(budget=without // 4)
    except autosac.InfeasibleError as e:
        named = _SMALLEST.search(str(e))
        if named is None:
            raise
        return planned(budget=int(parse_bytes(named[1]) * _ROUNDED))


def _model(kind: Kind) -> torch.nn.Module:
    torch.manual_seed(0)
    configuration = getattr(transformers, kind.configuration)(**kind.settings)
    if kind.input == "images":
        configuration.num_labels = 7
    model: torch.nn.Module = getattr(transformers, kind.model)(configuration).train()
    return model


def _batch(kind: Kind, device: torch.device) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    if kind.input == "tokens":
        tokens = torch.randint(3, 211, (_ROWS, _LENGTH), generator=generator).to(device)
        return {"input_ids": tokens, "labels": tokens}
    rows = _ROWS // 4
    if kind.input == "images":
        size = kind.settings.get("image_size", 64)
        side = size[0] if isinstance(size, list) else size
        return {"pixel_values": torch.randn(rows, 3, side, side, generator=generator).to(device)}
    labels = torch.randint(1, 30, (rows, 6), generator=generator).to(device)
    return {"input_values": torch.randn(rows, _SAMPLES, generator=generator).to(device), "labels": labels}


def _loss(kind: Kind, output: Any) -> torch.Tensor:
    own: torch.Tensor | None = getattr(output, "loss", None)
    if kind.input != "images":
        assert own is not None
        return own
    out = output.last_hidden_state if getattr(output, "logits", None) is None else output.logits
    squares: torch.Tensor = (out.float() ** 2).mean()
    return squares if own is None else squares + own


def _make_step(kind: Kind, autocast: bool, device: torch.device) -> Any:
    model = _model(kind).to(device)
    optimizer = torch.optim.SGD(model.parameters(), 1e-2, foreach=False)
    batch = _batch(kind, device)

    def step() -> None:
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            loss = _loss(kind, model(**batch))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return model, step


Trained = list[tuple[torch.Tensor, list["torch.Tensor | None"]]]


def _trained(kind: Kind, autocast: bool, plan: autosac.Plan | None) -> Trained:
    """Loss and gradients of each step on the CPU."""
    model = _model(kind)
    if plan is not None:
        autosac.apply(model, plan)
    optimizer = torch.optim.SGD(model.parameters(), 1e-2, foreach=False)
    batch = _batch(kind, torch.device("cpu"))
    steps: Trained = []
    with _seeded():
        for _ in range(_STEPS):
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                loss = _loss(kind, model(**batch))
            loss.backward()
            gradients = [None if p.grad is None else p.grad.clone() for p in model.parameters()]
            steps.append((loss.detach(), gradients))
            optimizer.step()
            optimizer.zero_grad()
    return steps


@contextmanager
def _seeded() -> Iterator[None]:
    """The same random numbers in each training, also for models that draw a seed themselves (Reformer: `torch.seed`)."""
    torch.manual_seed(5)
    np.random.seed(5)  # noqa: NPY002  (transformers draw from it)
    random.seed(5)
    before = torch.seed
    torch.seed = lambda: torch.manual_seed(7).initial_seed()
    try:
        yield
    finally:
        torch.seed = before


def _differs(expected: Trained, found: Trained) -> str:
    """Where two trainings differ first, in words; "" if nowhere."""
    for step, ((loss, gradients), (other_loss, other_gradients)) in enumerate(zip(expected, found, strict=True)):
        if not torch.equal(loss, other_loss):
            return f"the loss of step {step}"
        for i, (one, other) in enumerate(zip(gradients, other_gradients, strict=True)):
            if (one is None) != (other is None) or (
                one is not None and other is not None and not torch.equal(one, other)
            ):
                return f"gradient {i} of step {step}"
    return ""


def _line(error: BaseException) -> str:
    return " ".join(str(error).split())[:200]
