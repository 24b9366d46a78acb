"""What the simulated device knows of values: of constants, of numbers computed from them, of what is written over them."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from autosac.capture.device.shadows import MOST_KNOWN, shadow
from autosac.capture.jobs.eager import EagerRequest, capture_eager

aten = torch.ops.aten
INT, FLOAT, BOOL = torch.int64, torch.float32, torch.bool
Make = Callable[[torch.Tensor], torch.Tensor]


def check(cases: dict[str, tuple[Make, Any]]) -> None:
    """In a captured step, what is known (None: nothing) of the tensor that each case makes of 6 x 4 unknown numbers."""

    def make_step(device: torch.device) -> Any:
        x = torch.empty(6, 4, device=device).normal_()

        def step() -> None:
            found = {}
            with device:
                for name, (make, _) in cases.items():
                    values = shadow(make(x))
                    found[name] = None if values is None else values.tolist()
            assert found == {name: expected for name, (_, expected) in cases.items()}

        return step

    capture_eager(make_step, EagerRequest())


def written(tensor: torch.Tensor, write: Callable[[torch.Tensor], Any]) -> torch.Tensor:
    """The tensor after something was written into it, or into a view of it."""
    write(tensor)
    return tensor


def test_constants() -> None:
    """Integers are known, of floating-point numbers single ones; vectors of them may be weights, but become integers."""
    check(
        {
            "zeros": (lambda x: torch.zeros(2, dtype=INT), [0, 0]),
            "ones": (lambda x: torch.ones(2, dtype=INT), [1, 1]),
            "full": (lambda x: torch.full((2,), 7), [7, 7]),
            "zeros_like": (lambda x: torch.zeros_like(x, dtype=BOOL)[0], [False] * 4),
            "ones_like": (lambda x: torch.ones_like(x, dtype=INT)[0], [1] * 4),
            "full_like": (lambda x: torch.full_like(x, 3, dtype=INT)[0], [3] * 4),
            "new_zeros": (lambda x: x.new_zeros(2, dtype=INT), [0, 0]),
            "new_ones": (lambda x: x.new_ones(2, dtype=INT), [1, 1]),
            "new_full": (lambda x: x.new_full((2,), 5, dtype=INT), [5, 5]),
            "zero_ a part": (lambda x: written(torch.ones(4, dtype=INT), lambda t: t[:2].zero_()), [0, 0, 1, 1]),
            "one float": (lambda x: torch.ones(1), [1.0]),
            "tangent of zeros": (lambda x: torch._efficientzerotensor((1,), device=x.device), [0.0]),
            "a float scalar": (lambda x: torch.full((), 2.5), 2.5),
            "two floats": (lambda x: torch.ones(2), None),
            "floats to integers": (lambda x: torch.ones(2).long(), [1, 1]),
            "floats to bools": (lambda x: torch.zeros(3).bool(), [False] * 3),
            "floats to floats": (lambda x: torch.ones(2).double(), None),
            "written floats": (lambda x: torch.ones(2).add_(1).long(), None),
            "inferred floats": (inferred, [1, 1]),
            "written inferred floats": (written_in_inference, None),
            "none too many": (lambda x: torch.zeros(MOST_KNOWN, dtype=BOOL)[:1], [False]),
            "too many": (lambda x: torch.zeros(MOST_KNOWN + 1, dtype=BOOL)[:1], None),
            "too many floats": (lambda x: torch.ones(MOST_KNOWN + 1).bool()[:1], None),
            "not written": (lambda x: torch.empty(2, dtype=INT), None),
        }
    )


def inferred(x: torch.Tensor) -> torch.Tensor:
    """What is made in inference mode, where PyTorch counts no versions."""
    with torch.inference_mode():
        return torch.ones(2, device=x.device).long()


def written_in_inference(x: torch.Tensor) -> torch.Tensor:
    """A view of it is changed."""
    with torch.inference_mode():
        ones = torch.ones(2, device=x.device)
        ones[:1].add_(1)
        return ones.long()


def test_what_is_computed() -> None:
    """Results of known numbers are known, floating-point ones up to 64; those of one unknown are not."""
    check(
        {
            "arange": (lambda x: torch.arange(3), [0, 1, 2]),
            "64 floats": (lambda x: torch.arange(64.0)[:2], [0.0, 1.0]),
            "65 floats": (lambda x: torch.arange(65.0)[:2], None),
            "sum": (lambda x: torch.arange(4).sum() * 2, 12),
            "cat": (lambda x: torch.cat([torch.arange(2), torch.ones(1, dtype=INT)]), [0, 1, 1]),
            "cat with unknown": (lambda x: torch.cat([torch.arange(2), x[0].long()]), None),
            "unknown": (lambda x: x.long() + 1, None),
            "no kernel": (lambda x: torch.arange(2) + x[0, :2].long(), None),
            "sort": (lambda x: torch.tensor([3, 1, 2]).sort().indices, [1, 2, 0]),
            "moved": (lambda x: torch.arange(2, device="cpu").to(x.device), [0, 1]),
            "view": (lambda x: torch.arange(4).view(2, 2).t(), [[0, 2], [1, 3]]),
        }
    )


def test_operators_of_python_numbers() -> None:
    """On a simulated CPU they are computed, too: models take sizes from them."""

    def make_step(device: torch.device) -> Any:
        del device

        def step() -> None:
            assert int(torch.div(33, 8, rounding_mode="trunc")) == 4
            assert int(torch.add(1, 2)) == 3

        return step

    capture_eager(make_step, EagerRequest(target="cpu"))


def test_what_is_overwritten() -> None:
    """Unknown numbers in a tensor, or in a view of it, make all of it unknown; known ones are seen through views."""
    check(
        {
            "known": (lambda x: written(torch.arange(4), lambda t: t[1:3].add_(5)), [0, 6, 7, 3]),
            "unknown": (lambda x: written(torch.arange(4), lambda t: t.add_(x[0].long())), None),
            "unknown in a view": (lambda x: written(torch.arange(4), lambda t: t[:1].copy_(x[0, :1])), None),
            "known again": (
                lambda x: written(written(torch.arange(4), lambda t: t.add_(x[0].long())), lambda t: t.zero_()),
                [0] * 4,
            ),
            "read only": (lambda x: written(torch.arange(4), lambda t: t + x[0].long()), [0, 1, 2, 3]),
        }
    )


def test_assumptions() -> None:
    """Unknown numbers are finite, and equal to themselves; all arguments are valid; not all sequences have ended."""
    check(
        {
            "x == x": (lambda x: (x == x)[0], [True] * 4),
            "x != x": (lambda x: (x != x)[0], [False] * 4),
            "isnan": (lambda x: x.isnan()[0], [False] * 4),
            "isinf": (lambda x: x.isinf()[0], [False] * 4),
            "x != inf": (lambda x: aten.ne.Scalar(x, math.inf)[0], [True] * 4),
            "x != 1": (lambda x: (x != 1.0)[0], None),
            "x == y": (lambda x: x[0] == x[1], None),
            "integers": (lambda x: written(x.long(), lambda t: t) == x.long(), None),
            "known": (lambda x: torch.arange(2.0).isinf(), [False] * 2),
            "known nan": (lambda x: torch.full((1,), math.nan).isnan(), [True]),
            "all": (lambda x: (x > 0).all(), True),
            "all of a row": (lambda x: (x > 0).all(0), [True] * 4),
            "all is true": (lambda x: aten._is_all_true(x > 0), True),
            "all of known": (lambda x: torch.tensor([True, False]).all(), False),
            "any": (lambda x: (x > 0).any(), None),
            "all tokens": (lambda x: (x.long() == 2).all(), False),
            "all tokens so far": (lambda x: (torch.zeros(4, dtype=BOOL) | (x[0].long() == 2)).all(), False),
            "all of several tokens": (lambda x: torch.isin(x.long(), torch.tensor([2, 3])).all(), False),
        }
    )


def test_one_known_operand() -> None:
    """What decides alone is known: true in "or", false in "and", 0 in a bitwise "and"; a bitwise "or" with 1 is not."""
    yes, no = (lambda: torch.ones(4, dtype=BOOL)), (lambda: torch.zeros(4, dtype=BOOL))
    check(
        {
            "or": (lambda x: (x[0] > 0) | yes(), [True] * 4),
            "or no": (lambda x: (x[0] > 0) | no(), None),
            "logical or": (lambda x: torch.logical_or(yes(), x[0]), [True] * 4),
            "and": (lambda x: no() & (x[0] > 0), [False] * 4),
            "and yes": (lambda x: yes() & (x[0] > 0), None),
            "logical and": (lambda x: torch.logical_and(x[0], no()), [False] * 4),
            "and 0": (lambda x: x[0].long() & torch.zeros(4, dtype=INT), [0] * 4),
            "or 1": (lambda x: x[0].long() | torch.ones(4, dtype=INT), None),
            "known": (lambda x: torch.tensor([1, 2]) | torch.tensor([4, 4]), [5, 6]),
            "in place": (lambda x: written(x[0] > 0, lambda t: t.bitwise_or_(yes())), [True] * 4),
        }
    )


def test_experts() -> None:
    """Experts that unknown scores choose take turns, and tokens are counted as evenly; known scores choose the highest."""
    check(
        {
            "indices": (lambda x: x.topk(3).indices[:3], [[0, 1, 2], [3, 0, 1], [2, 3, 0]]),
            "scores": (lambda x: x.topk(3).values, None),
            "known indices": (lambda x: torch.tensor([3, 1, 2]).topk(2).indices, [0, 2]),
            "known scores": (lambda x: torch.tensor([3, 1, 2]).topk(2).values, [3, 2]),
            "counts": (lambda x: torch.histc(x, bins=5, min=0, max=5).long(), [5, 5, 5, 5, 4]),
            "known counts": (lambda x: torch.histc(x.topk(3).indices[:3], bins=4, min=0, max=4), [3, 2, 2, 2]),
        }
    )


def test_drawn_numbers() -> None:
    """Two or more are known, one is not; each draw goes on from the one before."""
    check(
        {
            "one": (lambda x: torch.rand(1), None),
            "two": (lambda x: (torch.rand(2) < 2).long(), [1, 1]),
            "like": (lambda x: (torch.rand_like(x[0]) < 2).long(), [1] * 4),
            "normal like": (lambda x: (torch.randn_like(x[0]).abs() < 99).long(), [1] * 4),
            "permutation": (lambda x: torch.randperm(5).sort().values, [0, 1, 2, 3, 4]),
            "integers": (lambda x: torch.randint(7, 8, (2,)), [7, 7]),
            "integers like": (lambda x: torch.randint_like(x[0].long(), 3, 4), [3] * 4),
            "others": (lambda x: (torch.rand(9) == torch.rand(9)).any(), False),
            "too many": (lambda x: torch.rand(MOST_KNOWN + 1)[:2], None),
        }
    )


def test_what_python_reads() -> None:
    """`.item()` of an unknown bool is False, of an integer 1, of a float 1.0, compared or not; of a known one its value."""
    check(
        {
            "bool": (lambda x: torch.tensor([(x > 0)[0, 0].item() is False]), [True]),
            "beyond": (lambda x: torch.tensor([bool(x[0, 0] > bound) for bound in (0.5, 2, -1)]), [True, False, False]),
            "integer": (lambda x: torch.tensor([x[0, 0].long().item()]), [1]),
            "float": (lambda x: torch.tensor([x[0, 0].item()]), [1.0]),
            "known": (lambda x: torch.tensor([torch.arange(4)[3].item()]), [3]),
        }
    )
