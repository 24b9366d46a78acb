"""What stands on a tape, and what stands in place of saved tensors; who observes recomputations."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import torch
from torch.utils._python_dispatch import _disable_current_modes

from autosac.errors import AutosacError
from autosac.integrations.operators.facts import Facts
from autosac.integrations.recompute import witness
from autosac.integrations.recompute.generators import GeneratorStates
from autosac.integrations.recompute.memories import View, Wrapped, alias, counter_of, looked_at, version_of
from autosac.plans import OutputMetadata

if TYPE_CHECKING:
    from autosac.integrations.recompute.tape import Tape


class RecomputationError(AutosacError, RuntimeError):
    """What a unit's backward needs cannot be computed again as it was. No gradient was made from it."""


class TapeEntry:
    """One operator on the tape. `reads`: the contents that it needs; `outputs`: the memory of each plain tensor in its result.

    `key` is (operator, occurrence) for reports, `place` whatever an observer wants to have back with the recomputation;
    `dtype` is what factories make, and numbers become, without a dtype. `with_gradients`: whether they were enabled, which
    some kernels ask. `changed`: the memories that it is changing. `flags`: PyTorch's switches, where the unit has set some.
    """

    changed: Sequence[tuple[int, torch.Tensor]] = ()
    writes: tuple[int, ...] = ()
    outputs: tuple[int, ...] = ()
    random: GeneratorStates | None = None
    place: Any = None
    flags: tuple[Any, ...] | None = None
    is_forced = False

    def __init__(
        self, func: Any, facts: Facts, args: Any, kwargs: Any, reads: list[View], key: tuple[str, int]
    ) -> None:
        self.func = func
        self.facts = facts
        self.args = args
        self.kwargs = kwargs
        self.reads = reads
        self.key = key
        self.dtype = torch.get_default_dtype()
        self.with_gradients = torch.is_grad_enabled()


class CompiledPart:
    """A compiled graph as an entry's function: how autocast was, and which of its arguments needed gradients.

    `leaves_unwritten`: it may leave parts of what it makes as the memory was. `saved`: what it has saved, while it runs.
    """

    def __init__(self, call: Any, autocast: Any, needs_gradient: list[bool], *, leaves_unwritten: bool) -> None:
        self.call = call
        self.autocast = autocast
        self.needs_gradient = needs_gradient
        self.leaves_unwritten = leaves_unwritten
        self.packed = 0
        self.saved: list[tuple[Holder, torch.Tensor]] = []

    def hold_saved(self) -> None:
        """What the graph has saved is not let go."""
        for holder, tensor in self.saved:
            holder.held = Held(tensor)


class SavedInPart(NamedTuple):
    """A tensor that a compiled graph saved: the position of its entry on the tape, and of the tensor among those it saves."""

    entry: int
    number: int


class Held:
    """A saved tensor that is held as it is. `counter` is a tensor that counts the changes of what was saved."""

    __slots__ = ("counter", "tensor", "version")

    def __init__(self, tensor: torch.Tensor, counter: torch.Tensor | None = None, version: int | None = None) -> None:
        self.tensor = tensor
        self.counter = tensor if counter is None else counter
        self.version = version_of(tensor) if counter is None else version

    def unpack(self, fqn: str) -> torch.Tensor:
        """The tensor. RuntimeError, as autograd's, if it was changed in place since."""
        now = version_of(self.counter)
        if now != self.version:
            raise RuntimeError(
                f"one of the variables needed for gradient computation has been modified by an inplace operation: "
                f"{self.tensor.dtype} {list(self.tensor.shape)}, saved in the module {fqn}, is at version {now}; "
                f"expected version {self.version} instead"
            )
        return self.tensor


class Holder:
    """A saved tensor that was let go: which one it was, and, for a moment in the backward, the recomputed one (`value`).

    `given` tells of a value that may be asked for again, because an autograd function of the user's own has read it: in which
    backward that was, and which version it had.

    `counter` counts its changes in place without holding its memory: others that share the memory may count by themselves.
    """

    __slots__ = ("__weakref__", "counter", "given", "held", "tape", "value", "version", "view", "witness")

    def __init__(self, tape: Tape, view: Any, tensor: torch.Tensor) -> None:
        self.tape = tape
        self.view = view
        self.version = version_of(tensor)
        self.witness = witness.of(tensor) if tape.audited or tensor.is_cpu else None
        self.counter = counter_of(tensor)
        self.value: torch.Tensor | None = None
        self.given: tuple[int, int | None] | None = None
        self.held: Held | None = None

    def is_changed(self, tensor: torch.Tensor) -> bool:
        """Whether the memory that `tensor` looks at has another content now than what was saved of it. It says no where it
        does not know.
        """
        if self.witness is None or type(self.view) is not View:
            return False
        with _disable_current_modes(), torch.no_grad():
            return witness.differs(looked_at(alias(tensor), self.view), self.witness)

    def give(self) -> torch.Tensor:
        """The recomputed tensor. It is let go, but for functions of the user's own: they may read it several times."""
        value = self.value
        assert value is not None
        if isinstance(torch._C._current_autograd_node(), torch.autograd.function.BackwardCFunction):
            self.given = torch._C._current_graph_task_id(), version_of(value)
        else:
            self.value = self.given = None
        return value

    def has_value(self) -> bool:
        """Whether the recomputed tensor is there. One that was read in an earlier backward, or changed since, is let go."""
        if self.value is None or self.given is None:
            return self.value is not None
        if self.given != (torch._C._current_graph_task_id(), version_of(self.value)):
            self.value = self.given = None
        return self.value is not None


TracedOperator: TypeAlias = tuple[str, OutputMetadata]
"""Name and results of an operator that the compiler has traced."""


class Observer:
    """What a capture wants to know of recomputations. This one wants nothing, and says to the user what he should know."""

    def traces(self, fqn: str) -> list[TracedOperator]:
        """The compiler is about to trace a unit: where its operators go, about which a policy decides, in their order."""
        return []

    def place(self) -> Any:
        """Where the operator that just ran belongs; `operator` gets it back."""
        return None

    def begin(self, fqn: str, forward: int) -> None:
        """The recomputation of a unit begins, of its forward of this number."""

    def operator(self, place: Any, key: tuple[str, int]) -> None:
        """The operator with this key is about to run again."""

    def gather(self, module: torch.nn.Module) -> None:
        """FSDP is about to gather the parameters of this module: the next operator reads some."""

    def gathered(self) -> None:
        """It has."""

    def ran(self) -> None:
        """All operators have run again; what is left are views of their results."""

    def end(self) -> None:
        """The recomputation has ended."""

    def mismatch(self, warning: Warning, is_first: bool) -> None:
        """A unit does not do what its plan says, for the first time or again: it is said once."""
        if is_first:
            warnings.warn(warning, stacklevel=4)


observer = [Observer()]
"""The one who observes in this process."""


def views_of(view: Any) -> list[View]:
    """The plain tensors that a saved tensor is made of."""
    if type(view) is View:
        return [view]
    if not isinstance(view, Wrapped):
        return []
    return [plain for inner in view.inner for plain in views_of(inner)]
