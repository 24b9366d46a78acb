"""Which results of operators the capture's cache builds again, and which make the operator run again."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from autosac.capture.device.cache import DispatchCache
from autosac.capture.device.recipes import Known

aten = torch.ops.aten
FAKE = FakeTensorMode()


class Given:
    """Stands for FakeTensorMode: every call gives fakes of the same tensors; `calls` counts them."""

    def __init__(self, make: Any) -> None:
        self.make, self.calls = make, 0

    def dispatch(self, *_: Any) -> Any:
        """The call's result."""
        self.calls += 1
        with FAKE:
            return self.make()


@pytest.mark.parametrize(
    ("make", "calls"),
    [
        (lambda: torch.empty(4, 3), 1),
        (lambda: torch.empty_strided((4, 3), (1, 4)), 1),
        (lambda: [torch.empty(4), torch.empty(3)], 1),
        (lambda: torch.empty(0, 3), 1),
        (lambda: torch.empty(12)[:4], 2),
        (lambda: torch.empty(12)[4:], 2),
        (lambda: list(torch.empty(12).as_strided((2, 12), (0, 1)).unbind()), 2),
    ],
)
def test_what_fills_memory_of_its_own_is_built_again(make: Any, calls: int) -> None:
    """A dense tensor, rows or columns first, several of them, an empty one: the second call is not handed on.

    Handed on are calls whose result is a part of a larger memory, at its beginning or its end, or that have two results in
    one memory. In both cases both calls give the same shapes.
    """
    mode = Given(make)
    cache = DispatchCache(mode, Known())  # type: ignore[arg-type]
    with FAKE:
        x = torch.empty(4, 3)
    results = [cache.run(aten.sin.default, (type(x),), (x,), {})[0] for _ in range(2)]
    first, second = (out if isinstance(out, list) else [out] for out in results)
    assert mode.calls == calls
    assert [(t.shape, t.stride()) for t in second] == [(t.shape, t.stride()) for t in first]
    assert len({t.untyped_storage()._cdata for t in (*first, *second)}) == (
        len(first) + len(second) if calls == 1 else 2
    )


@pytest.mark.parametrize("lazy", [torch.conj, torch._neg_view])
def test_what_is_lazily_conjugated_or_negated_is_not_what_it_is_a_view_of(lazy: Any) -> None:
    """A view of such a tensor is such a tensor, whatever was called with one of the same layout before: compiled backwards of
    rotary embeddings resolve the conjugate in a copy.
    """
    mode = FakeTensorMode()
    cache = DispatchCache(mode, Known())
    with mode:
        plain = torch.empty(4, dtype=torch.complex64)
        changed = lazy(plain)
    for x in (plain, changed, plain):
        out, _, _ = cache.run(aten.detach.default, (type(x),), (x,), {})
        assert (out.is_conj(), out.is_neg()) == (x.is_conj(), x.is_neg())
