"""Units that run eagerly and call compiled functions and modules: drawn from many kinds of both, and of ways to call them.

Every job is drawn anew. Graphs are made anew for the model under the plan, or are those that the model without it has made.
Inductor has no tolerance here: a plan changes nothing in a graph, and calls it as a whole.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Callable
from typing import Any

import torch
import torch._functorch.config as functorch_config
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from benchmarks.fuzz.families.compiled_code import BROKEN, CHANGES, FUNCTIONS, WIDTH
from benchmarks.fuzz.family import Job, family, mean_square, plain_step, rows_of, stack, tensors_of

Call = Callable[..., Any]
_EACH = 10**6  # variants: a job for each trial


# ---- how a unit calls what is compiled ---------------------------------------------------------------------


def _twice(call: Call, x: Tensor, w: Tensor, b: Tensor) -> Any:
    (first, *_) = _results(call(x, w, b), x)
    return call(first, w, b), call(x * 0.5, w.t().contiguous().t(), b)


def _checkpointed(call: Call, x: Tensor, w: Tensor, b: Tensor) -> Any:
    return checkpoint(lambda given: call(given, w, b), x, use_reentrant=False)


def _reentrant(call: Call, x: Tensor, w: Tensor, b: Tensor) -> Any:
    # A parameter that it returned would become its result, and its backward would never end.
    return checkpoint(lambda given: tuple(t * 1 for t in tensors_of(call(given, w, b))), x, use_reentrant=True)


def _without_gradients(call: Call, x: Tensor, w: Tensor, b: Tensor) -> Any:
    with torch.no_grad():
        return call(x, w, b)


def _in_bfloat16(call: Call, x: Tensor, w: Tensor, b: Tensor) -> Any:
    with torch.autocast("cpu", torch.bfloat16):
        return call(x, w, b)


def _hooked(call: Call, x: Tensor, w: Tensor, b: Tensor) -> Any:
    out = call(x, w, b)
    for tensor in tensors_of(out):
        if tensor.requires_grad and tensor.is_floating_point():
            tensor.register_hook(lambda gradient: gradient * 0.5)
            tensor.retain_grad()
    return out


def _changed_after(call: Call, x: Tensor, w: Tensor, b: Tensor) -> Any:
    out = call(x, w, b)
    first = next(t for t in tensors_of(out) if t.is_floating_point())
    held = first.sin()  # saves what is changed next, but for a copy
    return out, held if first.is_leaf or first._base is not None else held + first.clone().mul_(1.1)


def _changed_in_place(call: Call, x: Tensor, w: Tensor, b: Tensor) -> Any:
    (first, *_) = _results(call(x, w, b), x)
    return first.mul_(1.1)


def _of_a_view(call: Call, x: Tensor, w: Tensor, b: Tensor) -> Any:
    whole = torch.cat([x, x.cos()])
    return call(whole[1 : 1 + len(x)], w, b), whole.sin()


def _of_a_transpose(call: Call, x: Tensor, w: Tensor, b: Tensor) -> Any:
    return call(x.t().contiguous().t(), w, b)


def _of_dynamic_rows(call: Call, x: Tensor, w: Tensor, b: Tensor) -> Any:
    torch._dynamo.maybe_mark_dynamic(x, 0)
    return call(x, w, b)


def _of_detached(call: Call, x: Tensor, w: Tensor, b: Tensor) -> Any:
    return call(x.detach(), w, b), x


def _by_name(call: Call, x: Tensor, w: Tensor, b: Tensor) -> Any:
    return call(x, b=b, w=w)


WAYS: tuple[Callable[[Call, Tensor, Tensor, Tensor], Any] | None, ...] = (
    *(None,) * 8,
    _twice,
    _checkpointed,
    _reentrant,
    _without_gradients,
    _in_bfloat16,
    _hooked,
    _changed_after,
    _changed_in_place,
    _of_a_view,
    _of_a_transpose,
    _of_dynamic_rows,
    _of_detached,
    _by_name,
)


# ---- units --------------------------------------------------------------------------------------------------


def _results(out: Any, x: Tensor) -> list[Tensor]:
    """What a call has returned, each in the shape of its input."""
    found = []
    for tensor in tensors_of(out):
        tensor = torch.view_as_real(tensor) if tensor.is_complex() else tensor
        flat = tensor.reshape(-1).to(x.dtype)
        flat = flat[: x.numel()] if flat.numel() >= x.numel() else F.pad(flat, (0, x.numel() - flat.numel()))
        found.append(flat.view(x.shape) * 1.0)
    return found or [x * 1.0]


class _Part(nn.Module):
    def __init__(self, tied: nn.Parameter | None) -> None:
        super().__init__()
        self.norm, self.layer, self.dropout = nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, WIDTH), nn.Dropout(0.2)
        if tied is not None:
            self.layer.weight = tied

    def forward(self, x: Tensor) -> Tensor:
        return self.dropout(self.norm(self.layer(x)).relu())


class _Calling(nn.Module):
    """Calls compiled functions and modules one after the other; what each returns, the next may take."""

    def __init__(self, rng: random.Random, compiled: dict[str, Call]) -> None:
        super().__init__()
        self.w, self.layer = nn.Parameter(torch.randn(WIDTH, 2 * WIDTH) * 0.2), nn.Linear(WIDTH, WIDTH)
        self.register_buffer("b", torch.ones(()))
        self._calls: list[tuple[Any, ...]] = []
        self.parts = nn.ModuleList()
        self._wraps = rng.random() < 0.5
        for _ in range(rng.randint(1, 3)):
            if rng.random() < 0.1:
                self.parts.append(_Part(self.layer.weight if rng.random() < 0.5 else None))
                self._calls.append((None, None, rng.randrange(2), torch.sin))
                continue
            name = rng.choice(sorted(compiled))
            before = _scaled if name in CHANGES else rng.choice((torch.tanh, torch.sin, _scaled))
            self._calls.append((compiled[name], rng.choice(WAYS), rng.randrange(2), before))

    def compile_parts(self, backend: str) -> None:
        """The modules among what it calls."""
        for i, part in enumerate(self.parts):
            if self._wraps:
                self.parts[i] = torch.compile(part, backend=backend)  # type: ignore[assignment] # torch says a function
            else:
                part.compile(backend=backend)

    def forward(self, x: Tensor) -> Tensor:
        """As large as its input."""
        values, parts = [x * 1.0, self.layer(x)], iter(self.parts)
        for call, way, which, before in self._calls:
            given = before(values[-1 - which])
            if call is None:
                part = next(parts)
                values += _results(part(given), x)
            elif way is None:
                values += _results(call(given, self.w, self.b), x)
            else:
                values += _results(way(call, given, self.w, self.b), x)
        return sum(values[2:], x) / 3


def _scaled(x: Tensor) -> Tensor:
    return x * 0.9


@functools.lru_cache(maxsize=1)
def _compiled(key: float, backend: str) -> dict[str, Call]:
    """The functions of one trial, compiled: for the model with the plan and without."""
    torch._dynamo.reset()
    torch._C._dynamo.eval_frame._set_lru_cache(False)  # a checkpoint around a call takes another graph with it
    rng = random.Random(key)
    found = {}
    for function in FUNCTIONS:
        options: dict[str, Any] = {"dynamic": rng.choice((None, None, True, False))}
        if function not in BROKEN:
            options["fullgraph"] = rng.random() < 0.5
        if backend == "inductor" and rng.random() < 0.2:
            options["mode"] = "reduce-overhead"
        found[function.__name__] = torch.compile(function, backend=backend, **options)
    return found


# ---- steps --------------------------------------------------------------------------------------------------


def _accumulating(model: nn.Module, batch: Any) -> list[Tensor]:
    """Two microbatches of different sizes."""
    (x,) = batch
    return [loss for part in (x[:3], x[3:]) for loss in plain_step(model, (part,))]


def _evaluating(model: nn.Module, batch: Any) -> list[Tensor]:
    """A forward of another shape in eval mode between forward and backward."""
    (x,) = batch
    loss = mean_square(model(x))
    model.eval()
    with torch.no_grad():
        other = model(x[:5]).sum()
    model.train()
    loss.backward()
    return [loss.detach(), other]


def _two_losses(model: nn.Module, batch: Any) -> list[Tensor]:
    """Two backwards through one graph."""
    with functorch_config.patch(donated_buffer=False):  # PyTorch refuses the first one otherwise
        out = model(*batch)
        first, second = out.pow(2).mean(), out.abs().mean()
        first.backward(retain_graph=True)
        second.backward()
    return [first.detach(), second.detach()]


def _inside_out(model: nn.Module, batch: Any) -> list[Tensor]:
    """Two forwards, and the backward of the first one first."""
    losses = [mean_square(model(*batch)), mean_square(model(batch[0] * 0.5))]
    for loss in losses:
        loss.backward()
    return [loss.detach() for loss in losses]


def _with_compiled_loss(loss_of: Call, model: nn.Module, batch: Any) -> list[Tensor]:
    out = model(*batch)
    loss: Tensor = loss_of(out, torch.arange(len(out)) % WIDTH)
    loss.backward()
    return [loss.detach()]


def _loss(out: Tensor, wanted: Tensor) -> Tensor:
    return F.cross_entropy(out, wanted) + mean_square(out)


def _job(rng: random.Random, backend: str) -> Job:
    key, anew, evaluates = rng.random(), rng.random() < 0.5, rng.random() < 0.1
    functions = _compiled(key, backend)

    def transform(model: nn.Module) -> nn.Module:
        if anew:
            torch._dynamo.reset()
        for unit in model.get_submodule("blocks").children():
            unit.compile_parts(backend)
        return model.eval() if evaluates else model

    with_loss = functools.partial(_with_compiled_loss, torch.compile(_loss, backend=backend))
    # Inductor's second backward is wrong without a plan where sizes vary: the first one writes to what was saved.
    retaining = (_two_losses,) if backend == "aot_eager" else ()
    others = (_accumulating, _evaluating, *retaining, _inside_out, with_loss)
    step = rng.choice((*(plain_step,) * 5, *others)) if not evaluates else plain_step
    return stack(
        rng,
        lambda width: _Calling(rng, functions),
        WIDTH,
        step=step,
        transform=transform,
        double=False,
        batch=rows_of(WIDTH, grad=rng.random() < 0.2),
        rows=(24, 16),
    )


@family(
    "compiled_parts",
    "units call drawn functions and modules, compiled by aot_eager, in drawn ways",
    planner=False,
    limit_s=120.0,
    variants=_EACH,
)
def compiled_parts(rng: random.Random) -> Job:
    """Compiled by AOTAutograd, run eagerly."""
    return _job(rng, "aot_eager")


@family(
    "compiled_parts_inductor",
    "units call drawn functions and modules, compiled by Inductor, in drawn ways",
    planner=False,
    most=40,
    limit_s=240.0,
    variants=_EACH,
)
def compiled_parts_inductor(rng: random.Random) -> Job:
    """Compiled by Inductor."""
    return _job(rng, "inductor")
