"""What the host costs on this machine, from steps of tiny models: the parameters of `runtime_sim.HostModel`.

A step of a tiny model computes next to nothing, so its time is what the host pays: Python, autograd, dispatch. With n_e of the
step's events of each kind e, the costs h_e solve

    min over h >= 0 of  sum over steps of ((sum_e n_e h_e + d - t) / t)^2

where t is the measured step and d what its operators take by themselves: on a CPU their calibrated times, which have the
dispatch in them; nothing on a GPU, which works beside its host. n_e is what a host model charges for that costs 1 for e and
nothing for all others, since the step's host time is linear in the costs. They are fitted in three groups (`GROUPS`), each
from the steps that have nothing of a later group, with the earlier groups' costs given:

    1  operators of the forward, of the backward and of the optimizer, views, entries and exits of modules
    2  checkpointing: what begins a recomputation, and what its hooks cost every operator that is recomputed
    3  selective checkpointing: its dispatch mode, for every operator, and for every one that is saved

The last two are measured on a CPU only; on a GPU they are stated relative to an operator's cost (`HostModel.scaled`).
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from autosac.estimator.calibration.timing import cpu_clock
from autosac.runtime_sim.host import INSTANT_HOST, HostModel, host_costs
from autosac.trace import Trace

GROUPS = (
    ("eager_op_us", "backward_op_us", "optimizer_op_us", "view_op_us", "module_us"),
    ("recompute_op_us", "checkpoint_us"),
    ("selective_op_us", "saved_op_us"),
)
FIELDS = tuple(itertools.chain.from_iterable(GROUPS))
_STEPS, _WARM_UP = 15, 4
_UNITS = 4
_SAVED = ("addmm", "mm", "gelu", "silu", "sigmoid", "_softmax", "relu", "tanh", "mul", "native_layer_norm")
MakeStep = Callable[[torch.device], Any]


class Probe(NamedTuple):
    """A tiny step: how to make it, what it asks of the device, which of its modules are checkpointed selectively."""

    make_step: MakeStep
    trace: Trace
    selective: tuple[str, ...] = ()


class _Views(nn.Module):
    """Splits heads off and joins them again, as attention does."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Eight views and one product."""
        rows, width = x.shape
        y = x.view(rows, 2, width // 2).transpose(0, 1).transpose(0, 1).reshape(rows, width)
        first, second = y.chunk(2, dim=-1)
        return x * torch.cat((first, second), dim=-1).unsqueeze(0).squeeze(0)


class _Chain(nn.Module):
    """Elementwise operators without any module around them."""

    def __init__(self, rounds: int) -> None:
        super().__init__()
        self.rounds = rounds

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Three operators a round."""
        for _ in range(self.rounds):
            x = torch.tanh(x) * 0.5 + x
        return x


def _step_of(parts: Callable[[], list[nn.Module]], optimizer: Callable[..., Any] | None, device: torch.device) -> Any:
    with device:
        model = nn.Sequential(*parts())
    x = torch.ones(16, 16, device=device)
    stepper = optimizer(model.parameters()) if optimizer is not None else None

    def step() -> None:
        model(x).sum().backward()
        if stepper is not None:
            stepper.step()
        model.zero_grad()

    return model, step


def _mixture() -> list[nn.Module]:
    """Different operators one after the other: in a real step, hardly any finds its instructions in the cache."""
    return [
        nn.Linear(16, 16),
        nn.LayerNorm(16),
        nn.GELU(),
        nn.Linear(16, 16, bias=False),
        nn.RMSNorm(16),
        nn.SiLU(),
        _Views(),
        nn.Linear(16, 16),
        nn.Softmax(dim=-1),
        nn.ReLU(),
        _Chain(1),
        nn.Sigmoid(),
        nn.LayerNorm(16),
        nn.Dropout(0.1),
    ]


def _checkpointed(part: nn.Module, saved: tuple[str, ...] | None = None) -> nn.Module:
    """Recomputes `part` as plans do; selectively, keeping the operators that are named, if any are given (or none: `()`)."""
    settings: dict[str, Any] = {"preserve_rng_state": True, "early_stop": False}
    if saved is not None:

        def decide(_: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
            name = operator.overloadpacket.__name__
            return CheckpointPolicy.MUST_SAVE if name in saved else CheckpointPolicy.MUST_RECOMPUTE

        settings["context_fn"] = lambda: create_selective_checkpoint_contexts(decide)
    return checkpoint_wrapper(part, **settings)


def checkpoint_probes() -> dict[str, tuple[MakeStep, tuple[str, ...]]]:
    """Tiny steps under checkpointing, by name, with the modules that have selective modes: large and small units."""

    def make(parts: Callable[[], list[nn.Module]]) -> MakeStep:
        return lambda device: _step_of(parts, None, device)

    def mixtures(saved: tuple[str, ...] | None = None) -> list[nn.Module]:
        return [_checkpointed(nn.Sequential(*_mixture()), saved) for _ in range(_UNITS)]

    units = tuple(map(str, range(_UNITS)))
    return {
        "units": (make(mixtures), ()),
        "small units": (make(lambda: [*_mixture(), *(_checkpointed(nn.Linear(16, 16)) for _ in range(24))]), ()),
        "selective, nothing saved": (make(lambda: mixtures(())), units),
        "selective, half saved": (make(lambda: mixtures(_SAVED)), units),
    }


def probes() -> dict[str, MakeStep]:
    """The tiny steps, by name: the same mixture, with more of one kind of event in each."""

    def make(extra: Callable[[], list[nn.Module]], optimizer: Callable[..., Any] | None = None) -> MakeStep:
        return lambda device: _step_of(lambda: [*_mixture(), *extra(), *_mixture()], optimizer, device)

    return {
        "mixture": make(lambda: _mixture()),
        "linear": make(lambda: [nn.Linear(16, 16) for _ in range(24)]),
        "sgd": make(list, lambda p: torch.optim.SGD(p, lr=1e-4, momentum=0.9)),
        "adamw": make(list, lambda p: torch.optim.AdamW(p, lr=1e-4)),
        "chain": make(lambda: [_Chain(4) for _ in range(6)]),
        "views": make(lambda: [_Views() for _ in range(8)]),
        "modules": make(lambda: [nn.Identity() for _ in range(120)]),
        "norms": make(lambda: [part for _ in range(8) for part in (nn.LayerNorm(16), nn.RMSNorm(16))]),
    }


def measure_probes(made: Sequence[MakeStep], device: torch.device) -> list[float]:
    """Milliseconds of the steps, each the lower quartile (the machine may have other work); the steps take turns."""
    steps = [make(device)[1] for make in made]
    clock = cpu_clock()
    times: list[list[float]] = [[] for _ in steps]
    for number in range(_WARM_UP + _STEPS):
        for step, found in zip(steps, times, strict=True):
            step()  # Python's and the processor's caches are this step's again
            begin = clock()
            step()
            if device.type == "cuda":
                torch.cuda.synchronize()
            if number >= _WARM_UP:
                found.append((clock() - begin) * 1e3)
    return [statistics.quantiles(found, n=4)[0] for found in times]


def event_counts(probe: Probe) -> NDArray[np.float64]:
    """How often the step pays each of FIELDS."""
    return np.array([_host_ms(probe, INSTANT_HOST, **{name: 1e3}) for name in FIELDS])  # a millisecond for each


def _host_ms(probe: Probe, host: HostModel, **costs_us: Any) -> float:
    """What the step costs a host with these costs in place of its own."""
    return float(host_costs(probe.trace, replace(host, **costs_us), probe.selective).sum())


def fit_host(probed: Sequence[Probe], step_ms: Sequence[float], operators_ms: Sequence[float]) -> dict[str, float]:
    """The host's costs in microseconds, by field; fields that no step pays are left out.

    What else the default host model charges (long lists of tensors) is taken off first, since predictions charge it too.
    """
    measured = np.array(step_ms)
    counts = np.array([event_counts(probe) for probe in probed]) / 1e3
    others = np.array([_host_ms(probe, HostModel(), **dict.fromkeys(FIELDS, 0.0)) for probe in probed])
    left = np.maximum(measured - np.array(operators_ms) - others, 0.0)
    group_of = np.repeat(np.arange(len(GROUPS)), [len(group) for group in GROUPS])
    last = np.where(counts > 0, group_of, -1).max(axis=1)
    found: dict[str, float] = {}
    for number, group in enumerate(GROUPS):
        rows, columns = np.flatnonzero(last == number), np.flatnonzero(group_of == number)
        if not rows.size:
            continue
        weighted = counts[np.ix_(rows, columns)] / measured[rows, None]
        costs = nonnegative_least_squares(weighted, left[rows] / measured[rows])
        left -= counts[:, columns] @ costs
        found |= {name: round(float(value), 4) for name, value in zip(group, costs, strict=True)}
    return found


def nonnegative_least_squares(rows: NDArray[np.float64], wanted: NDArray[np.float64]) -> NDArray[np.float64]:
    """The x >= 0 that minimises |rows x - wanted|."""
    from sklearn.linear_model import LinearRegression

    return np.asarray(LinearRegression(positive=True, fit_intercept=False).fit(rows, wanted).coef_)
