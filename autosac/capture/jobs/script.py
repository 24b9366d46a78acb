"""Capture of a script that runs by itself: where its steps begin and end.

Nobody says what a step of a script is. It is what happens from one `Optimizer.step` of the script's first optimizer to the
next. More exactly, after that call a step ends, and the next one begins, with

- a module's forward with gradients enabled that no other module calls,
- an operator on the device, outside of optimizers and backwards, that reads nothing of it: a batch comes from the host, or is
  drawn (a single number is none),
- a receive of floating-point numbers from another rank: a pipeline stage has its buffers already (a single number is a loss
  that is logged), or
- where the first step has begun with no module's forward, an operator with gradients enabled that reads a parameter: the
  script calls functions, or methods of modules (`detach` and ``parameter.data`` compute nothing);

so that reading the loss, clearing gradients and averaging weights belong to the step before. Evaluation is a part of the step
in which it happens. If the step that would be kept evaluates, the next one is kept: most scripts evaluate seldom. So it is if
an optimizer makes its states in it: that of a GAN's generator, whose first step comes after the critic's. The first step
begins with the first such forward of a module that has parameters to train; without any, after the first call of
`Optimizer.step`. A script without a torch.optim optimizer steps where it first writes into a parameter after a backward.

A call of `Optimizer.step` without a backward since the last one does not end another step: DeepSpeed's ZeRO-3 updates one part
of the parameters after the other. How many such calls there are is learnt from the first iteration, which therefore counts as
so many steps; the one that is kept comes later.

Another optimizer takes the first one's place where that is gone, or has been silent for so long that it will hardly step
again: layers thaw, a search for a learning rate is over. The steps that follow are others; one of them is kept.

Every step is recorded. What it did to memory becomes a part of the prologue when the next one begins (`EventLog`).
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterable
from typing import Any, Protocol

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils import _pytree as pytree

from autosac.capture.device.cache import CachedCall
from autosac.capture.device.device import current_stream
from autosac.capture.device.operators import mutates
from autosac.capture.jobs.fast_forward import FastForward
from autosac.capture.jobs.marker import Marker
from autosac.capture.patches import module_calls
from autosac.capture.patches.untraced import untraced
from autosac.capture.record.construction import trains
from autosac.capture.record.recorder import Recorder

_DDP_STEPS = 3  # DDP sorts its buckets anew in the second step
_ALLOCATIONS = (torch.ops.aten.empty_strided.default, torch.ops.aten.empty.memory_format)  # of compiled code, mostly
_MOST_ASIDE = 32  # a script that goes on like that trains on another stream
_EVALUATES, _MAKES_STATES = "evaluates", "makes states"  # why a step may be unlike most
_SILENT = 32  # steps of another optimizer, each after a backward, between two of the first one


class StopScript(BaseException):
    """Enough steps have run. No `Exception`, so that the script does not take it for one of its own."""


class ScriptListener(Protocol):
    """Listens to a script's steps and operators."""

    def step_ended(self, number: int) -> None:
        """The recorder holds a complete step."""

    def step_begun(self, number: int) -> None:
        """The next step begins."""

    def forward_begun(self, number: int) -> None:
        """A forward of this step begins. May raise StopScript."""

    def model_called(self, module: torch.nn.Module) -> None:
        """The first module is called that will be trained; the first step begins next."""

    def operator_ran(self) -> None:
        """The recorder has logged an operator."""

    def taken_over(self, number: int) -> None:
        """In this step another optimizer has taken the first one's place."""


class ScriptSteps:
    """Stands between the dispatch mode and the recorder (an OperatorLog) and finds the steps.

    `number`: the step that is under way, 0 before the first. `complete`: steps that have ended. `period`: calls of
    `Optimizer.step` in a step. `over_at`: the events of the step up to the last of these calls. `marker`: the name of a
    function of the script, each call of which ends a step in their place. `forward` does without computing steps when it is
    asked to begin.
    """

    def __init__(self, recorder: Recorder, listener: ScriptListener, period: int = 1, marker: str = "") -> None:
        self.recorder = recorder
        self.forward = FastForward(lambda: len(recorder.log.events), self._replayed, self.differentiated)
        self._marker = Marker(marker, self._marked) if marker else None
        self.number = self.complete = 0
        self._listener = listener
        self._period = period
        self._learns = period == 1 and not marker
        self._by_hand = 0  # steps that ended where parameters changed, before an optimizer was seen: parts of one
        self._has_changed = False  # a parameter, since the last backward
        self._unlike = 0  # the last step that is known not to be like those that follow
        self._unusual: set[str] = set()  # what this step does that most do not
        self._passed_for: set[str] = set()  # for each of these one step was passed over: the next may do it, too
        self._known: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()  # have stepped
        self._repeated = 0  # calls in the first iteration that came without a backward
        self._calls = 0
        self._first: weakref.ref[torch.optim.Optimizer] | None = None
        # Steps of other optimizers since the first one's last, each after a backward.
        self._others: weakref.WeakKeyDictionary[torch.optim.Optimizer, int] = weakref.WeakKeyDictionary()
        self._is_fresh = False  # a backward has run since any optimizer stepped
        self._is_over = False
        self.over_at = 0
        self._has_run_backward = self._has_stepped = False
        self._has_modules = self._is_forward = False
        self._calls_modules = False  # the first step has begun with a module's forward
        self._has_gradients = False  # a backward has run, and no optimizer has stepped yet
        self._depth = 0
        self._updating = 0  # optimizers of any kind whose step() runs
        self.warm_up = 0  # the last step that was a warm-up for CUDA graphs
        self._computing = 0  # the last step whose forward has begun
        self._updates: int | None = None  # calls of `Optimizer.step` in the graph that is being captured

    def install(self) -> None:
        """Follow modules and optimizers. Before the recorder does, so that a step begins before its first module."""
        from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

        module_calls.follow(lambda module, _: self._enter(module), self._leave)
        register_optimizer_step_pre_hook(untraced(lambda optimizer, *_: self._before(optimizer)))
        register_optimizer_step_post_hook(untraced(lambda optimizer, *_: self._after(optimizer)))

    @property
    def kept(self) -> int:
        """The step that is the first like all that follow, as far as is known."""
        usual = self.warm_up + (_DDP_STEPS if self.recorder.uses_ddp else 2) + self._repeated + self._by_hand
        return max(usual, self._unlike + 1)

    def finish(self) -> None:
        """The script has ended: the last step is complete if its optimizer has stepped."""
        if self._is_over:
            self._end()

    def pass_over(self, number: int) -> None:
        """The step with this number is not like those that follow."""
        self._unlike = number

    @property
    def is_over(self) -> bool:
        """Whether the step's optimizer has stepped, and no forward has come since."""
        return self._is_over

    @property
    def is_outside(self) -> bool:
        """Whether a module that is called now, with gradients, would begin a forward of its own."""
        is_idle = not (self._depth or self._updating or self.forward.active) and self._updates is None
        return is_idle and torch.is_grad_enabled() and not _in_backward()

    def _enter(self, module: torch.nn.Module) -> None:
        self._depth += 1
        self._has_modules = True
        self._updating = 0  # a step() that is left by an exception calls no hook
        if self._depth > 1 or not torch.is_grad_enabled() or self._updates is not None:
            if not (torch.is_grad_enabled() or module.training):
                self._unusual.add(_EVALUATES)
            return
        if _in_backward():  # what is checkpointed runs again, maybe after an optimizer that steps in a backward's hook
            return
        if self._is_over:
            self._begin()
        elif not self.number and trains(module):
            self._listener.model_called(module)
            if self._marker is not None:
                self._marker.install()
            self._begin()
            self._calls_modules = True
        if self.number:
            try:
                self._forward_begins()
            except StopScript:
                self._depth -= 1  # hooks that leave a module see no BaseException
                raise

    def _leave(self, module: torch.nn.Module, args: Any, *rest: Any) -> None:
        self._depth -= 1
        if not self._depth and self.number and len(rest) == 2:  # one that is left by an exception has no kwargs
            self.forward.called(module, args, *rest)

    def _forward_begins(self) -> None:
        """A step whose first forward runs on another stream warms up a graph; batches may be copied there in any step."""
        if self.number > self._computing:
            self._computing = self.number
            if current_stream().stream_id and self.number <= _MOST_ASIDE:
                self.warm_up = self.number
        self._listener.forward_begun(self.number)

    def _replayed(self, module: torch.nn.Module) -> None:
        self._enter(module)
        self._depth -= 1

    def differentiated(self) -> None:
        """A backward has run, or would have."""
        self._has_gradients = self._has_run_backward = self._is_fresh = True
        self._has_changed = False

    def _before(self, optimizer: torch.optim.Optimizer) -> None:
        self._updating += 1
        if self._first is None:
            self._first, self._by_hand, self._calls = weakref.ref(optimizer), self.complete, 0

    def _after(self, optimizer: torch.optim.Optimizer) -> None:
        self._updating = max(0, self._updating - 1)
        if optimizer not in self._known:
            self._known.add(optimizer)
            self._unusual.add(_MAKES_STATES)
        if self._updates is not None:
            self._updates += self._is_first(optimizer)
        elif self._marker is None and (self._is_first(optimizer) or self._takes_over(optimizer)):
            self._others.update(dict.fromkeys(self._others, 0))
            self._learn()
            self._has_gradients = False
            self._stepped()
        self._is_fresh = False

    def _is_first(self, optimizer: torch.optim.Optimizer) -> bool:
        return self._first is not None and self._first() is optimizer

    def _takes_over(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether this step is one of an optimizer that has taken the first one's place. The step under way was begun for the
        first one, and the one that is kept comes later.
        """
        if self._first is None or not self.number or not self._is_fresh:
            return False
        if optimizer not in self._others:
            gc.collect()  # optimizers and schedulers refer to each other
        self._others[optimizer] = self._others.get(optimizer, 0) + 1
        if self._first() is not None and self._others[optimizer] < _SILENT:
            return False
        self._first, self._calls, self._has_stepped = weakref.ref(optimizer), 0, False
        if not self.forward.active:
            self.pass_over(self.number)
        self._listener.taken_over(self.number)
        return True

    def _learn(self) -> None:
        """How many calls there are in an iteration: those up to the next one with a backward before it."""
        if not self._learns:
            return
        if self._has_gradients and self._has_stepped:
            self._learns, self._period, self._calls = False, 1 + self._repeated, 0
        elif self._has_gradients:
            self._has_stepped = True
        elif self._has_run_backward:
            self._repeated += 1

    def _stepped(self) -> None:
        self._calls += self.number > 0  # one before the first step is not a part of any
        self._is_over = self._calls % self._period == 0
        self.over_at = len(self.recorder.log.events)

    def _marked(self) -> None:
        self._is_over = self.number > 0
        self.over_at = len(self.recorder.log.events)

    def _begin(self) -> None:
        if self._is_over:
            self._end()
        self._is_forward = False
        self._unusual.clear()
        self._listener.step_begun(self.number + 1)
        self.number += 1
        self.forward.step_begun()
        if not self.forward.active:
            self.recorder.begin_recording(self.number)

    def _end(self) -> None:
        self._is_over = False
        if not self.number:
            return
        if not self.forward.active:
            self.recorder.end_recording()
        self.complete = self.number
        if self.number == self.kept and not self._unusual <= self._passed_for:
            self._passed_for |= self._unusual
            self.pass_over(self.number)
        self._listener.step_ended(self.number)

    # ---- CUDA graphs ------------------------------------------------------------------------------------------------

    def begin_capture(self) -> None:
        """What runs now is no step: it will be, whenever the graph is launched."""
        self._updates = 0
        self.warm_up = self.number

    def end_capture(self) -> int:
        """How often the first optimizer has stepped since."""
        updates, self._updates = self._updates or 0, None
        return updates

    def launch_begins(self, has_backward: bool) -> None:
        """A graph will be launched: inside of a step, or as the first part of one that computes gradients."""
        if has_backward and not _in_backward() and (self._is_over or not self.number):
            self._begin()
        if has_backward:
            self.differentiated()
            if self.number and not _in_backward():
                self._forward_begins()

    def launch_ends(self, updates: int) -> None:
        """It has been launched, with so many updates in it."""
        self.forward.launched()
        for _ in range(updates):
            self._learn()
            self._has_gradients = False
            self._stepped()
        if not self.forward.active:
            self._listener.operator_ran()

    # ---- OperatorLog ------------------------------------------------------------------------------------------------

    def operator(
        self, func: Any, args: Any, kwargs: Any, out: Any, entry: CachedCall | None, tensors: list[FakeTensor] | None
    ) -> None:
        """An operator ran on the device."""
        if self._updates is not None:
            self.recorder.operator(func, args, kwargs, out, entry, tensors)
            self._listener.operator_ran()
            return
        if _in_backward():
            self.differentiated()
        elif self._first is None and self._marker is None:
            self._look_for_updates(func, args)
        if self._is_over and self._begins_step(func, args, kwargs, out, tensors):
            self._begin()
        if not (self._has_modules or self._is_forward) and self.number:
            self._is_forward = self._reads_parameter(func, args, kwargs, tensors)
            if self._is_forward:
                self._forward_begins()
        if self.forward.active:
            return
        self.recorder.operator(func, args, kwargs, out, entry, tensors)
        self._listener.operator_ran()

    def _begins_step(self, func: Any, args: Any, kwargs: Any, out: Any, tensors: list[FakeTensor] | None) -> bool:
        if self._updating or _in_backward() or func in _ALLOCATIONS:
            return False
        if _receives(func, args):
            return True
        if self._on_device(args, kwargs, tensors):
            return not self._calls_modules and self._reads_parameter(func, args, kwargs, tensors)
        return any(t.dim() > 0 for t in self._on_device((out,), {}, None))  # what the host does by itself is no batch

    def _reads_parameter(self, func: Any, args: Any, kwargs: Any, tensors: list[FakeTensor] | None) -> bool:
        if not torch.is_grad_enabled() or _in_backward() or func is torch.ops.aten.detach.default:
            return False
        return any(t.requires_grad and t.is_leaf for t in self._on_device(args, kwargs, tensors))

    def _on_device(self, args: Any, kwargs: Any, tensors: list[FakeTensor] | None) -> list[torch.Tensor]:
        found = tensors if tensors is not None else pytree.arg_tree_leaves(*args, **kwargs)
        return [t for t in found if isinstance(t, torch.Tensor) and t.device.type == self.recorder.target]

    def _look_for_updates(self, func: Any, args: Any) -> None:
        """Without an optimizer: a step is over when a parameter changes after a backward."""
        is_open = self._has_gradients and not self._has_changed
        if is_open and args and mutates(func) and self._is_parameter(args[0]):
            self._has_changed = True
            self._stepped()

    def _is_parameter(self, written: Any) -> bool:
        """Whether a tensor, or the first of a list, is memory of a parameter, as ``parameter.data`` is."""
        first = written[0] if isinstance(written, (list, tuple)) and written else written
        if not isinstance(first, torch.Tensor):
            return False
        memory = first.untyped_storage()._cdata
        return any(
            p.untyped_storage()._cdata == memory for part in self.recorder.model_parts for p in part.parameters()
        )

    def triton_kernel(self, name: str, arguments: Iterable[Any], **details: Any) -> None:
        """A generated kernel was launched."""
        if self.forward.active:
            return
        self.recorder.triton_kernel(name, arguments, **details)
        self._listener.operator_ran()

    def wrapped(self) -> None:
        """A tensor subclass is about to take a call apart."""
        if not self.forward.active:
            self.recorder.wrapped()

    def host_reads(self) -> None:
        """The host reads a value."""
        if not self.forward.active:
            self.recorder.host_reads()

    def record_stream(self, tensor: torch.Tensor, stream_id: int) -> None:
        """`Tensor.record_stream`."""
        self.recorder.record_stream(tensor, stream_id)


def _receives(func: Any, args: Any) -> bool:
    """Whether it is what another rank has computed that arrives."""
    schema = getattr(func, "_schema", None)
    return (
        schema is not None
        and schema.name in ("c10d::recv_", "c10d::recv_any_source_")
        and any(tensor.is_floating_point() and tensor.numel() > 1 for tensor in args[0])
    )


def _in_backward() -> bool:
    return bool(torch._C._current_graph_task_id() != -1)
