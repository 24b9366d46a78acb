"""What the first real steps of a model take: whole steps, modules, memory. No profiler, and nothing is changed in the model.

A step ends when an optimizer of the model has stepped. After the warm-up the modules get hooks for the measured steps:

    forward     from the module's call to its return
    backward    from the first gradient of one of its outputs to the last gradient of one of its inputs, with what is
                recomputed in between; not known of modules whose inputs need no gradients

Times are CUDA events on the current stream where the model is on a GPU, read when all steps are done, and the host's clock
elsewhere. Modules: the outermost ones that hold no list of modules, of a transformer its layers, embedding, norm and output.
Of compiled models only whole steps are timed, for hooks would be compiled with them.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils._pytree import tree_leaves

from autosac.integrations.operators.modules import clean_name, is_compiled
from autosac.runs import MeasuredSteps, RunMemory, UnitTimes

Stamp: TypeAlias = Any
_CONTAINERS = (nn.ModuleList, nn.ModuleDict)


def units_of(model: nn.Module, prefix: str = "") -> Iterator[tuple[str, nn.Module]]:
    """The modules that are timed, with their clean names; they lie beside each other."""
    for name, child in model.named_children():
        path = f"{prefix}{name}"
        if isinstance(child, _CONTAINERS):
            for key, element in child.named_children():
                if isinstance(element, _CONTAINERS):
                    yield from units_of(element, f"{path}.{key}.")
                else:
                    yield clean_name(f"{path}.{key}"), element
        elif any(isinstance(inner, _CONTAINERS) for inner in child.modules()):
            yield from units_of(child, f"{path}.")
        else:
            yield clean_name(path), child


@dataclass
class _Calls:
    """The stamps of one module in one step: (begin, end) of every forward and backward."""

    forward: list[tuple[Stamp, Stamp]] = field(default_factory=list)
    backward: list[list[Stamp]] = field(default_factory=list)


class FirstSteps:
    """Measures the steps after the first `warm_up`, and gives what it has measured to `done` inside the last one's optimizer.

    Add all parts of the model before its first step.
    """

    def __init__(self, done: Callable[[MeasuredSteps], None], *, warm_up: int = 2, steps: int = 3) -> None:
        self._done, self._warm_up, self._steps = done, warm_up, steps
        self._models: list[nn.Module] = []
        self._device = torch.device("cpu")
        self._marker: Any = None  # the optimizer with whose step a step of the job ends
        self._ends: list[Stamp] = []
        self._calls: list[dict[str, _Calls]] = []
        self._peaks = [0, 0]
        self._in_backward = False
        self._handles: list[Any] = [register_optimizer_step_post_hook(self._stepped)]

    def add(self, model: nn.Module) -> None:
        """A part of the model; changed as it may be until its first step."""
        self._models.append(model)

    def remove(self) -> None:
        """Measure no more."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

    # ---- steps -------------------------------------------------------------------------------------------------

    def _stepped(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        if not self._handles:
            return
        if self._marker is None:
            mine = {id(p): p for model in self._models for p in model.parameters()}
            found = [mine[id(p)] for group in optimizer.param_groups for p in group["params"] if id(p) in mine]
            if not found:
                return
            self._marker, self._device = optimizer, found[0].device
        if optimizer is not self._marker:
            return
        self._in_backward |= torch._C._current_autograd_node() is not None
        self._ends.append(self._stamp())
        self._read_peaks()
        done = len(self._ends)
        if done == self._warm_up:
            self._watch()
        if self._warm_up <= done < self._warm_up + self._steps:
            self._calls.append({})
        elif done >= self._warm_up + self._steps:
            self.remove()
            self._done(self._measured())

    def _stamp(self) -> Stamp:
        if self._device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _ms(self, begin: Stamp, end: Stamp) -> float:
        return (end - begin) * 1e3 if self._device.type != "cuda" else float(begin.elapsed_time(end))

    def _read_peaks(self) -> None:
        """Others may reset PyTorch's peaks between the steps."""
        if self._device.type == "cuda":
            stats = torch.cuda.memory_stats(self._device)
            found = (stats["active_bytes.all.peak"], stats["reserved_bytes.all.peak"])
            self._peaks = [max(pair) for pair in zip(self._peaks, found, strict=True)]

    # ---- modules -----------------------------------------------------------------------------------------------

    def _watch(self) -> None:
        if any(_compiles(module) for model in self._models for module in model.modules()):
            return
        for model in self._models:
            for fqn, module in units_of(model):
                self._watch_unit(fqn, module)

    def _watch_unit(self, fqn: str, module: nn.Module) -> None:
        begins: list[Stamp] = []

        def enter(_: nn.Module, args: Any) -> None:
            begins.append(self._stamp())

        def leave(_: nn.Module, args: Any, kwargs: Any, out: Any) -> None:
            if not begins:
                return
            calls = self._calls[-1].setdefault(fqn, _Calls())
            calls.forward.append((begins.pop(), self._stamp()))
            if torch.is_grad_enabled():
                self._watch_gradients(calls, (args, kwargs), out)

        self._handles.append(module.register_forward_pre_hook(enter, prepend=True))
        self._handles.append(module.register_forward_hook(leave, with_kwargs=True))

    def _watch_gradients(self, calls: _Calls, inputs: Any, out: Any) -> None:
        stamps: list[Stamp] = []
        calls.backward.append(stamps)
        with_gradient = [[t for t in tree_leaves(tree) if _has_gradient(t)] for tree in (inputs, out)]
        if not all(with_gradient):
            return

        def begin(_: torch.Tensor) -> None:
            if not stamps:
                stamps.append(self._stamp())

        def end(_: torch.Tensor) -> None:
            if stamps:
                stamps[1:] = [self._stamp()]

        for tensor in with_gradient[1]:
            tensor.register_hook(begin)
        for tensor in with_gradient[0]:
            tensor.register_hook(end)

    # ---- the result --------------------------------------------------------------------------------------------

    def _measured(self) -> MeasuredSteps:
        name = ""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
            name = torch.cuda.get_device_name(self._device)
        ends = self._ends[self._warm_up - 1 :]
        names = dict.fromkeys(fqn for step in self._calls for fqn in step)
        return MeasuredSteps(
            device=self._device.type,
            device_name=name,
            torch_version=str(torch.__version__),
            warm_up=self._warm_up,
            steps_ms=tuple(self._ms(a, b) for a, b in itertools.pairwise(ends)),
            units=tuple(self._unit(fqn) for fqn in names),
            memory=RunMemory(peak_active_bytes=self._peaks[0], peak_reserved_bytes=self._peaks[1]) if name else None,
            in_backward=self._in_backward,
        )

    def _unit(self, fqn: str) -> UnitTimes:
        steps = [step[fqn] for step in self._calls if fqn in step]
        forward = [sum(self._ms(*pair) for pair in step.forward) for step in steps]
        known = all(len(stamps) == 2 for step in steps for stamps in step.backward)
        backward = [sum(self._ms(*stamps) for stamps in step.backward) for step in steps] if known else []
        return UnitTimes(
            fqn=fqn,
            forward_ms=max(0.0, statistics.median(forward)),
            backward_ms=max(0.0, statistics.median(backward)) if backward else None,
        )


def _has_gradient(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.requires_grad


def _compiles(module: nn.Module) -> bool:
    return is_compiled(module) or getattr(module, "_compiled_call_impl", None) is not None
