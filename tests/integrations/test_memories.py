"""What looks at which memory: the functions that tell tensors apart, on plain tensors."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._mode_utils import no_dispatch
from torch.utils._python_dispatch import TorchDispatchMode

from autosac.integrations.recompute.memories import (
    Memory,
    Wrapped,
    alias,
    counter_of,
    has_storage,
    looked_at,
    looks_alike,
    own,
    plain_in,
    plain_tensors,
    version_of,
    view_of,
    whole_copy,
)


class Pair(torch.Tensor):
    """A tensor made of two."""

    @staticmethod
    def __new__(cls, a: torch.Tensor, b: torch.Tensor) -> Pair:
        made: Pair = torch.Tensor._make_wrapper_subclass(cls, a.shape, dtype=a.dtype)  # type: ignore[attr-defined]
        made.a, made.b = a, b
        return made

    a: torch.Tensor
    b: torch.Tensor

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        """Its two tensors."""
        return ["a", "b"], "context"

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, torch.Tensor], context: Any, size: Any, stride: Any) -> Pair:
        """Of two tensors again."""
        assert context == "context"
        return Pair(inner["a"], inner["b"])

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Only what is needed to take history away."""
        with no_dispatch():
            (tensor,) = args
            return Pair(tensor.a, tensor.b)


def test_a_counter_counts_changes_without_memory() -> None:
    """It has no elements, and its version rises with every change of the tensor, through views too."""
    tensor = torch.ones(4)
    counter = counter_of(tensor)
    assert counter is not None and counter.untyped_storage().nbytes() == 0
    before = version_of(counter)
    assert before is not None
    tensor.add_(1)
    tensor[1:].mul_(2)
    assert version_of(counter) == before + 2 == version_of(tensor)


def test_what_cannot_change_unseen_has_no_counter() -> None:
    """Parameters, tensors made of tensors, and inference tensors; the latter have no version."""
    with torch.inference_mode():
        inference = torch.ones(2)
    for tensor in (torch.nn.Parameter(torch.ones(2)), Pair(torch.ones(2), torch.ones(2)), inference):
        assert counter_of(tensor) is None
    assert version_of(inference) is None and version_of(torch.ones(2)) == 0


def test_counters_are_made_unseen() -> None:
    """No mode hears of an operator."""

    class Heard(TorchDispatchMode):
        calls = 0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.calls += 1
            return func(*args, **(kwargs or {}))

    tensor = torch.ones(3, dtype=torch.int16)
    with Heard() as mode:
        assert counter_of(tensor) is not None
    assert mode.calls == 0


def test_tensors_made_of_tensors_are_taken_apart() -> None:
    """Down to the plain ones, in order, in whatever an operator returns."""
    a, b, c = torch.ones(2), torch.zeros(2), torch.ones(1)
    inner = Pair(a, b)
    assert plain_tensors(a)[0] is a and [id(t) for t in plain_tensors(Pair(inner, c))] == [id(a), id(b), id(c)]
    assert [id(t) for t in plain_in(a)] == [id(a)]
    assert [id(t) for t in plain_in((inner, [c], None, 3))] == [id(a), id(b), id(c)]
    wrapped = Wrapped(Pair, ("a", "b"), "context", (), a.size(), a.stride())
    made: Any = wrapped.around([b, a])
    assert made.a is b and made.b is a


def test_what_has_a_storage() -> None:
    """Strided tensors have one, sparse ones none that others share."""
    assert has_storage(torch.ones(2)) and not has_storage(torch.ones(2).to_sparse())


def test_an_alias_shares_memory_and_version_without_history() -> None:
    """Also within dispatch; what needs no gradient is its own alias."""
    parameter = torch.nn.Parameter(torch.ones(2))
    found = alias(parameter)
    assert found.data_ptr() == parameter.data_ptr() and not found.requires_grad
    with torch.no_grad():
        parameter.add_(1)
    assert found._version == parameter._version == 1
    plain = torch.ones(2)
    assert own(plain) is plain and own(parameter) is not parameter and not own(parameter).requires_grad


VIEWS = {
    "itself": lambda t: t,
    "part": lambda t: t[1:, 2:],
    "transposed": lambda t: t.t(),
    "other type": lambda t: t.view(torch.float32),
    "conjugate": lambda t: t.conj(),
    "negative": lambda t: t.conj().imag,
    "expanded": lambda t: t[0].expand(3, 6),
}


@pytest.mark.parametrize("name", VIEWS)
@pytest.mark.parametrize("start", VIEWS)
def test_any_view_is_found_from_any_other(name: str, start: str) -> None:
    """The same values at the same place, whatever tensor on that memory is at hand."""
    whole = torch.arange(24.0).view(4, 6).to(torch.complex64) * (1 + 2j)
    wanted, given = VIEWS[name](whole), VIEWS[start](whole)
    memory = Memory(3, whole)
    view = view_of(wanted, 7, memory)
    assert (view.memory, view.epoch, view.wait) == (7, 0, -1)
    found = looked_at(given, view)
    assert looks_alike(found, view) and found.data_ptr() == wanted.data_ptr()
    assert torch.equal(torch.resolve_neg(torch.resolve_conj(found)), torch.resolve_neg(torch.resolve_conj(wanted)))
    assert looks_alike(given, view) == (name == start)


@pytest.mark.parametrize("name", VIEWS)
def test_a_copy_of_all_of_a_memory(name: str) -> None:
    """As large as the storage, with what was in it, on memory of its own."""
    whole = torch.arange(24.0).view(4, 6).to(torch.complex64)
    copy = whole_copy(VIEWS[name](whole))
    assert copy.untyped_storage().nbytes() == whole.untyped_storage().nbytes()
    assert copy.data_ptr() != whole.data_ptr()
    assert torch.equal(looked_at(copy, view_of(whole, 0, Memory(-1, None))), whole)


def test_a_memory_that_is_written() -> None:
    """From its first change on."""
    memory = Memory(2, None)
    assert not memory.is_written and memory.writers == [2]
    memory.epoch += 1
    assert memory.is_written
