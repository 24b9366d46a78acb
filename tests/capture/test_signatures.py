"""What an operator was called with, call by call."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from autosac.capture.device.masks import COMPUTED
from autosac.capture.record import signatures
from autosac.capture.record.signatures import SignatureTable, is_random, launches_nothing, scalar_arguments
from autosac.trace import Signature, TensorMeta

aten = torch.ops.aten
X = torch.empty(2, 3)
META = TensorMeta((2, 3), (3, 1), "float32")


@pytest.mark.parametrize(
    ("func", "args", "kwargs", "expected"),
    [
        (aten.add.Tensor, (X, X), {"alpha": 2}, (("alpha", 2),)),
        (aten._softmax.default, (X, -1, False), {}, (("dim", -1), ("half_to_float", False))),
        (aten.sum.dim_IntList, (X, [0, 1]), {"dtype": torch.bfloat16}, (("dim", (0, 1)), ("dtype", "bfloat16"))),
        (aten.empty.memory_format, ([2, 3],), {"device": torch.device("cpu"), "pin_memory": None}, (("size", (2, 3)),)),
        (aten.native_layer_norm.default, (X, [], None, None, 1e-5), {}, (("eps", 1e-5),)),
    ],
)
def test_scalar_arguments(func: Any, args: Any, kwargs: Any, expected: Any) -> None:
    """By name, whether they are given by position or by keyword; tensors, devices, None and empty lists are left out."""
    assert scalar_arguments(func, args, kwargs) == expected


def test_what_changes_a_tensors_metadata_launches_nothing() -> None:
    """Views, in place too, and what sets a tensor's storage or gives its size; arithmetic in place does launch."""
    free = (aten.view.default, aten.as_strided_.default, aten.t_.default, aten.resize_.default, aten.detach_.default)
    assert all(map(launches_nothing, (*free, aten.set_.source_Storage_storage_offset)))
    assert not any(map(launches_nothing, (aten.add_.Tensor, aten.copy_.default, aten.clone.default)))


def test_what_is_no_operator_has_numbered_arguments() -> None:
    """A function without a schema: its arguments by position are called by their numbers."""
    assert scalar_arguments(object(), (X, 3, "up"), {"flag": True}) == (("1", 3), ("2", "up"), ("flag", True))


def test_only_what_has_no_schema_is_asked_for_its_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    """Flexible attention has none, and notes the share that its mask leaves; operators note nothing."""
    monkeypatch.setattr(signatures, "share_of", lambda func, args: 0.25)
    assert scalar_arguments(object(), (X, 3), {}) == (("1", 3), (COMPUTED, 0.25))
    assert scalar_arguments(aten.add.Tensor, (X, X), {"alpha": 2}) == (("alpha", 2),)


def test_alike_calls_have_one_signature() -> None:
    """The same call again is found; another argument, or a call that writes to its first tensor, is another signature."""
    table = SignatureTable("cpu")
    assert table.add(aten.add.Tensor, (X, X), {}, [X, X], [X]) == 0
    assert table.add(aten.add.Tensor, (X, X), {"alpha": 2}, [X, X], [X]) == 1
    assert table.add(aten.add.Tensor, (X, X), {}, [X, X], [X]) == 0
    assert table.add(aten.add_.Tensor, (X, X), {}, [X, X], [X]) == 2
    first, _, third = table.finished()
    assert first == Signature("aten.add.Tensor", (META, META), (META,))
    assert third == Signature("aten.add_.Tensor", (META, META), (META,), mutates=(0,))


def test_wrapped_calls_have_a_signature_of_their_own() -> None:
    """A call that a tensor subclass took apart differs from the plain one by its number of wrappers only."""
    table = SignatureTable("cpu")
    plain = table.add(aten.add.Tensor, (X, X), {}, [X, X], [X])
    assert [table.wrapped(plain, 1), table.wrapped(plain, 2), table.wrapped(plain, 1)] == [1, 2, 1]
    assert table.add(aten.add.Tensor, (X, X), {}, [X, X], [X]) == plain
    first, second, third = table.finished()
    assert (second, third) == (first._replace(wrappers=1), first._replace(wrappers=2)) and first.wrappers == 0


def test_tensors_in_lists_are_counted_where_they_stand() -> None:
    """Of two lists of two, the first is written to: positions 0 and 1; `out` comes after the three tensors before it."""
    table = SignatureTable("cpu")
    table.add(aten._foreach_add_.List, ([X, X], [X, X]), {}, [X] * 4, [])
    table.add(aten.addmm.out, (X, X, X), {"out": X}, [X] * 4, [X])
    assert [signature.mutates for signature in table.finished()] == [(0, 1), (3,)]


def test_random_calls() -> None:
    """Dropout and random numbers draw; attention only with dropout; a sum never."""
    flash = aten._scaled_dot_product_flash_attention.default
    assert is_random(aten.native_dropout.default, ()) and not is_random(aten.sum.default, ())
    assert is_random(flash, (("dropout_p", 0.1),))
    assert not is_random(flash, (("dropout_p", 0.0),)) and not is_random(flash, (("is_causal", True),))


def test_kernels_have_their_tensors_only() -> None:
    """Alike launches of one kernel share a signature, whatever lies between."""
    table = SignatureTable("cpu")
    other = torch.empty(4, dtype=torch.int64)
    assert [table.add_kernel("triton.k", t) for t in ([X], [other], [X])] == [0, 1, 0]
    assert table.finished()[1] == Signature("triton.k", (TensorMeta((4,), (1,), "int64"),), ())
