"""What Triton kernels write to, read from their source, which is not run. Their language stands in."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from autosac.integrations.apply import apply
from autosac.integrations.operators.kernels import written_arguments_of, written_parameters
from autosac.integrations.recompute.compiled_parts import launched

tl: Any = ModuleType("triton.language")
helpers: Any = SimpleNamespace(other_kernel=None)


def plain(a: Any, b: Any, out: Any, n: Any, BLOCK: Any) -> None:
    """Reads two, and writes one."""
    rows = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    total = tl.load(a + rows, mask=rows < n) + tl.load(b + rows, mask=rows < n)
    tl.store(out + rows, total, mask=rows < n)


def through_names(a: Any, out: Any, counts: Any, n: Any) -> None:
    """Writes through names that are bound again, in a loop, and by an atomic addition."""
    place = a
    for i in range(n):
        place = out + i if i else counts
        tl.atomic_add(place, tl.load(a + i).to(tl.float32))
        place += 1


def by_offsets_from_memory(a: Any, offsets: Any, out: Any) -> None:
    """Where it writes depends on contents of other memory, which is not written for that."""
    start = tl.load(offsets + tl.program_id(0))
    tl.store(out + start, tl.load(a + start))


def by_descriptor(a: Any, out: Any, rows: Any) -> None:
    """Stores are a method of what was made of a parameter, too."""
    descriptor = tl.make_tensor_descriptor(out, [rows, 64], [64, 1], [16, 64])
    descriptor.store([0, 0], tl.make_tensor_descriptor(a, [rows, 64], [64, 1], [16, 64]).load([0, 0]))


def by_keyword(a: Any, out: Any) -> None:
    """The address has a name."""
    tl.store(value=tl.load(a), pointer=out)


def calls_another(a: Any, b: Any, out: Any) -> None:
    """Nobody looks into other functions: they may write to all that they are given."""
    helpers.other_kernel(b, tl.load(a))
    tl.store(out, min(1, 2))


def pointers_in_memory(table: Any, out: Any) -> None:
    """It writes to addresses that it has read: nothing can be said."""
    tl.store(tl.load(table).to(tl.pointer_type(tl.float32)), 0.0)


def assembler(a: Any) -> None:
    """Nothing can be said."""
    tl.inline_asm_elementwise("st.global", "r", [a], dtype=tl.int32, is_pure=False, pack=1)


@pytest.mark.parametrize(
    ("kernel", "written"),
    [
        (plain, {"out", "BLOCK"}),
        (through_names, {"a", "out", "counts", "n"}),  # `place` is derived from all of them, in some order
        (by_offsets_from_memory, {"out"}),
        (by_descriptor, {"out", "rows"}),
        (by_keyword, {"out"}),
        (calls_another, {"b", "out"}),
        (pointers_in_memory, None),
        (assembler, None),
        (len, None),
    ],
)
def test_what_a_kernel_writes_to(kernel: Callable[..., Any], written: set[str] | None) -> None:
    """By parameters: what stores' addresses are derived from (numbers, too), and what other functions get; None where that is
    not known.
    """
    assert written_parameters(kernel) == written


def test_arguments_of_a_launch() -> None:
    """By position and by name, without options of the launch; of what is no kernel nothing is known."""
    kernel = SimpleNamespace(fn=plain)
    assert written_arguments_of(kernel, ("a", "b", "out"), {"n": 3, "num_warps": 4}) == ["out"]
    assert written_arguments_of(kernel, ("a",), {"b": "b", "out": "out", "grid": (1,)}) == ["out"]
    assert written_arguments_of(object(), ("a",), {}) is None


_LAUNCHES: list[int] = []


def _run(source: torch.Tensor, counts: torch.Tensor, out: torch.Tensor) -> None:
    """What the kernel `scaled` computes."""
    _LAUNCHES.append(len(out))
    out.numpy()[...] = source.numpy() * counts.numpy()


def scaled(source: Any, counts: Any, out: Any) -> None:
    """A kernel that writes to its last argument only."""
    i = tl.program_id(0)
    tl.store(out + i, tl.load(source + i) * tl.load(counts + i))


class Scaled(nn.Module):
    """Counts are read by an operator before a kernel reads them; the kernel fills a buffer, which was empty or is given."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.given: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The output."""
        y = self.first(x)
        counts = y.detach().exp()
        sums = counts.cumsum(0)
        out = torch.empty_like(counts) if self.given is None else self.given
        launched(_run, "scaled", (y.detach(), counts, out), {}, SimpleNamespace(fn=scaled))
        return self.second(y.sigmoid() * out) * sums


class Model(nn.Module):
    """One such block."""

    def __init__(self) -> None:
        super().__init__()
        self.block = Scaled()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Its output."""
        return self.block(x).relu()


@pytest.mark.filterwarnings("error::autosac.integrations.apply.PlanMismatchWarning")
@pytest.mark.parametrize(
    ("keep", "is_given", "launches"),
    [
        (set(), False, 2),
        ({"aten.exp.default"}, False, 2),
        ({"aten.exp.default", "aten.empty_like.default"}, False, 1),
        (set(), True, 1),
        ({"aten.exp.default"}, True, 1),
    ],
)
def test_a_unit_with_a_kernel_that_is_known(lab: Any, keep: set[str], is_given: bool, launches: int) -> None:
    """What the kernel only reads may be kept though others have read it before. It runs again unless the buffer that it fills
    is kept, or is from outside, where autograd has it. Gradients are bitwise those without a plan.
    """
    torch.manual_seed(0)
    model, x = Model(), torch.randn(3, 4)
    given = torch.zeros(3, 4)
    model.block.given = given if is_given else None
    plan, _ = lab.plan_keeping(model, lambda m: m(x), {"block": keep})

    def step(m: Any) -> list[torch.Tensor]:
        m.block.given = given.zero_() if is_given else None
        out = m(x)
        out.square().sum().backward()
        return [out.detach(), *(p.grad.clone() for p in m.parameters())]

    expected = step(model)
    model.zero_grad()
    planned = apply(model, plan)
    _LAUNCHES.clear()
    assert lab.same(tuple(step(planned)), tuple(expected))
    assert len(_LAUNCHES) == launches


@pytest.mark.skipif(sys.version_info < (3, 14), reason="annotations are evaluated where they are written")
def test_annotations_that_only_type_checkers_know(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel's annotations may name what is not there: only its parameters' names matter."""
    (tmp_path / "typed_kernels.py").write_text("def typed(a: Unknown, out: Unknown):\n    tl.store(out, tl.load(a))\n")
    monkeypatch.syspath_prepend(tmp_path)
    module = importlib.import_module("typed_kernels")
    module.tl = tl
    assert written_arguments_of(SimpleNamespace(fn=module.typed), ("here", "there"), {}) == ["there"]
