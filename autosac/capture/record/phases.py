"""Where in the job an operator belongs: the phase of the step, the module, the line of source.

- **Phases**: forward from the first module call; backward inside the autograd engine; recompute where a module's forward
  runs inside of it, or a function that `torch.utils.checkpoint` runs again (`again`), or any code with gradients enabled
  below a node of it (checkpointing by others), or a unit of a plan is recomputed (`begin_recomputation`); optimizer inside
  `Optimizer.step`; other elsewhere in a step; setup before the first one.
- **Modules**: by global module hooks in the forward; in the backward by autograd's sequence number: a node belongs to the
  module (and source line) that was running when the node was made.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from autosac.capture.device.sources import calling_line
from autosac.capture.record.distinct_values import DistinctValues
from autosac.capture.record.log import EventLog
from autosac.integrations.operators.modules import clean_name, unwrapped
from autosac.trace import ModuleEnter, ModuleExit, Phase

_get_sequence_number = torch._C._autograd._get_sequence_nr
_current_node = torch._C._current_autograd_node
_is_grad_enabled = torch.is_grad_enabled
ROOT = 0
_RECOMPUTATION = -1  # in the stack of modules: where recomputation began
_ENCLOSING = (Phase.SETUP, Phase.BACKWARD, Phase.RECOMPUTE)  # what they contain does not end them


class ModuleTable:
    """The modules of all model parts by their clean names; the root comes first."""

    def __init__(self) -> None:
        self.names: list[str] = [""]
        self.parents: list[int] = [-1]
        self.classes: list[str] = [""]
        self.of_object: dict[int, int] = {}

    def add(self, model: torch.nn.Module) -> None:
        """Name the modules of a model part; names of wrappers are left out."""
        by_name = {name: i for i, name in enumerate(self.names)}
        for raw_name, module in unwrapped(model).named_modules():
            name = clean_name(raw_name)
            if name not in by_name:
                parent = by_name[name.rpartition(".")[0]] if name else -1
                by_name[name] = len(self.names)
                self.names.append(name)
                self.parents.append(parent)
                self.classes.append("")
            position = by_name[name]
            self.classes[position] = type(module).__name__  # the innermost wrapper comes last
            self.of_object[id(module)] = position

    def path(self, module: int) -> list[int]:
        """The module and its ancestors below the root, outermost first."""
        chain = []
        while module > ROOT:
            chain.append(module)
            module = self.parents[module]
        return chain[::-1]


class OperatorPlace(NamedTuple):
    """Where an operator belongs."""

    phase: Phase
    module: int
    source: int


class PhaseTracker:
    """Follows the job through its phases and modules and logs the module events."""

    def __init__(self, log: EventLog) -> None:
        self.modules = ModuleTable()
        self.sources: DistinctValues[str] = DistinctValues()
        self.sources.add("")
        self.phase = Phase.SETUP
        self._log = log
        self._resting = Phase.SETUP  # the phase outside of forward and backward
        self._stack: list[int] = [ROOT]
        self._optimizers: list[tuple[Phase, Phase]] = []
        self._backward_module = ROOT
        self._creates_graph = False
        self._checkpoints = 0  # functions of the job's own checkpointing that run again now
        self._again = ROOT  # the unit that is, or was last, recomputed
        self._repeated: OperatorPlace | None = None  # while a unit is recomputed: where its operators belong
        # (sequence number after the operator, (module, source)), ascending: who made which autograd nodes.
        self._node_numbers: list[int] = []
        self._node_owners: list[tuple[int, int]] = []

    def begin_step(self) -> None:
        """A training step begins."""
        self.phase = self._resting = Phase.OTHER

    def locate(self) -> OperatorPlace:
        """The place of an operator that is being issued."""
        if self._repeated is not None:
            return self._repeated
        phase = self.phase
        if phase is not Phase.BACKWARD:
            module = self._stack[-1]
        else:
            node = _current_node()
            module, source = self._owner(node)
            if node is None or not (self._checkpoints or (_is_grad_enabled() and not self._creates_graph)):
                if module != self._backward_module:
                    self._move_backward(module)
                return OperatorPlace(phase, module, source)
            phase = Phase.RECOMPUTE
        source = self.sources.add(calling_line())
        number = _get_sequence_number()
        if not self._node_numbers or number > self._node_numbers[-1]:
            self._node_numbers.append(number)
            self._node_owners.append((module, source))
        return OperatorPlace(phase, module, source)

    def _owner(self, node: Any) -> tuple[int, int]:
        """(module, source) that made an autograd node; those of the node before it if that is unknown."""
        if node is not None:
            position = bisect.bisect_right(self._node_numbers, node._sequence_nr())
            if position < len(self._node_owners):
                return self._node_owners[position]
        return self._backward_module, 0

    # ---- forward ----------------------------------------------------------------------------------------------------

    def enter_module(self, module: torch.nn.Module) -> bool:
        """A module's forward begins; True if it is the outermost. Unknown modules count as the one around them."""
        outermost = False
        if self.phase is Phase.OTHER or self.phase is Phase.OPTIMIZER:  # the closure of an optimizer
            self.phase = Phase.FORWARD
        if self.phase is Phase.FORWARD:
            outermost = len(self._stack) == 1
        elif self.phase is Phase.BACKWARD:
            self._move_backward(self._owner(_current_node())[0])
            self.phase = Phase.RECOMPUTE
            self._stack.append(_RECOMPUTATION)
        around = self._stack[-1] if self._stack[-1] != _RECOMPUTATION else self._backward_module
        position = self.modules.of_object.get(id(module), around)
        if position != self._stack[-1]:
            self._log.add(ModuleEnter(position, self.phase))
        self._stack.append(position)
        return outermost

    def exit_module(self) -> None:
        """The innermost module's forward ends, perhaps by an exception (recomputation stops early, or a step fails: then hooks
        may leave more modules than they have entered, because those of compiled code only leave).
        """
        if len(self._stack) < 2:
            return
        position = self._stack.pop()
        if position != self._stack[-1]:
            self._log.add(ModuleExit(position, self.phase))
        if self._stack[-1] == _RECOMPUTATION:
            self._stack.pop()
            self.phase = Phase.BACKWARD

    # ---- recomputation of units -------------------------------------------------------------------------------------

    @property
    def is_repeating(self) -> bool:
        """Whether a unit is being recomputed."""
        return self._repeated is not None

    def here(self) -> tuple[int, int]:
        """The module at work and its line."""
        return self._stack[-1], self.sources.add(calling_line())

    def begin_recomputation(self, fqn: str) -> None:
        """The operators of a unit run again, without its modules. A name that the model does not have stands for all of it:
        a program may give a plan to a part of its model.
        """
        module = self.modules.names.index(fqn) if fqn in self.modules.names else ROOT
        if self.phase is Phase.BACKWARD:
            self._move_backward(self._owner(_current_node())[0])
        self._log.add(ModuleEnter(module, Phase.RECOMPUTE))
        self._again = module
        self._repeated = OperatorPlace(Phase.RECOMPUTE, module, 0)

    def repeat(self, place: tuple[int, int]) -> None:
        """The next operator of the recomputation belongs where it belonged in the forward."""
        self._repeated = OperatorPlace(Phase.RECOMPUTE, *place)

    def end_recomputation(self) -> None:
        """They have run."""
        self._repeated = None
        self._log.add(ModuleExit(self._again, Phase.RECOMPUTE))

    def again(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """A function that the job checkpoints. All that it runs in a backward is recomputation: forwards of custom autograd
        functions, too, which run without gradients, and whether or not that backward creates a graph.
        """

        def run(*args: Any, **kwargs: Any) -> Any:
            is_again = self.phase is Phase.BACKWARD
            self._checkpoints += is_again
            try:
                return function(*args, **kwargs)
            finally:
                self._checkpoints -= is_again

        return run

    # ---- backward ---------------------------------------------------------------------------------------------------

    def run_backward(self, engine: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run the autograd engine. Re-entrant backwards leave the phase that they are in as it was."""
        before, depth = self.phase, len(self._stack)
        outer = self._backward_module, self._creates_graph
        self._backward_module = ROOT
        self._creates_graph = bool(kwargs.get("create_graph", args[3] if len(args) > 3 else False))
        self.phase = Phase.BACKWARD
        try:
            return engine(*args, **kwargs)
        finally:
            del self._stack[depth:]
            self.leave_backward_modules()
            self._backward_module, self._creates_graph = outer
            self.phase = self._after(before)

    def _move_backward(self, module: int) -> None:
        """Log the module exits and entries on the way from the present backward module to `module`."""
        present, new = self.modules.path(self._backward_module), self.modules.path(module)
        common = 0
        while common < min(len(present), len(new)) and present[common] == new[common]:
            common += 1
        for position in reversed(present[common:]):
            self._log.add(ModuleExit(position, Phase.BACKWARD))
        for position in new[common:]:
            self._log.add(ModuleEnter(position, Phase.BACKWARD))
        self._backward_module = module

    def leave_backward_modules(self) -> None:
        """Nothing more is done in the backward of any module."""
        self._move_backward(ROOT)

    # ---- optimizer --------------------------------------------------------------------------------------------------

    def enter_optimizer(self) -> None:
        """`Optimizer.step` begins, perhaps inside of a backward."""
        self._optimizers.append((self.phase, self._resting))
        self.phase = self._resting = Phase.OPTIMIZER

    def exit_optimizer(self) -> None:
        """`Optimizer.step` ends."""
        before, self._resting = self._optimizers.pop()
        self.phase = self._after(before)

    def _after(self, before: Phase) -> Phase:
        """The phase once something inside of `before` has ended. A module's forward goes on: what it compiles is traced
        with a backward, and a model may ask for gradients of its own.
        """
        is_inside = before in _ENCLOSING or (before is Phase.FORWARD and len(self._stack) > 1)
        return before if is_inside else self._resting
