"""Which attention kernel the target GPU would choose."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode

from autosac.capture.device.attention import Attention, aligned_mask
from autosac.target import TargetGPU

FLASH, EFFICIENT = SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION
CUDNN, MATH = SDPBackend.CUDNN_ATTENTION, SDPBackend.MATH
HOPPER, AMPERE, TURING = (9, 0), (8, 0), (7, 5)
TITAN = [CUDNN, FLASH, EFFICIENT, MATH]  # TorchTitan's order of priority


def chosen(
    dtype: torch.dtype = torch.bfloat16,
    head: int = 64,
    *,
    capability: tuple[int, int] = HOPPER,
    key_heads: int = 4,
    key_length: int = 16,
    mask: Any = None,
    dropout: float = 0.0,
    causal: bool = False,
    head_v: int | None = None,
) -> SDPBackend:
    """The choice for a batch of 2, 4 heads and 16 positions."""
    q = torch.zeros(2, 4, 16, head, dtype=dtype)
    k = torch.zeros(2, key_heads, key_length, head, dtype=dtype)
    v = torch.zeros(2, key_heads, key_length, head_v or head, dtype=dtype)
    attention = Attention(TargetGPU(compute_capability=capability))
    return attention.choose(q, k, v, mask, dropout, key_heads != 4, causal)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({}, FLASH),
        ({"dtype": torch.float16, "dropout": 0.1, "causal": True}, FLASH),
        ({"dtype": torch.float32}, EFFICIENT),
        ({"dtype": torch.float64}, MATH),
        ({"mask": torch.zeros(16, 16)}, EFFICIENT),
        ({"head": 256}, FLASH),
        ({"head": 264}, EFFICIENT),
        ({"head": 20}, FLASH),
        ({"head": 20, "mask": torch.zeros(16, 16)}, MATH),
        ({"dtype": torch.float32, "head": 20}, EFFICIENT),
        ({"dtype": torch.float32, "head": 18}, MATH),
        ({"head_v": 32}, EFFICIENT),
        ({"key_length": 8}, FLASH),
        ({"key_length": 8, "causal": True}, EFFICIENT),
        ({"key_heads": 2}, FLASH),
        ({"key_heads": 2, "dtype": torch.float32}, MATH),
        ({"capability": AMPERE}, FLASH),
        ({"capability": TURING, "dtype": torch.float16}, EFFICIENT),
        ({"capability": TURING, "dtype": torch.bfloat16}, MATH),
        ({"capability": TURING, "dtype": torch.float32}, EFFICIENT),
    ],
)
def test_priorities_without_cudnn(arguments: Any, expected: SDPBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    """Flash first, then efficient, then math, each if it can do it (sdp_utils.cpp)."""
    monkeypatch.setenv("TORCH_CUDNN_SDPA_DEPRIORITIZED", "1")
    assert chosen(**arguments) == expected


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({}, CUDNN),
        ({"capability": (10, 0)}, CUDNN),
        ({"capability": AMPERE}, FLASH),
        ({"capability": (8, 9)}, FLASH),
        ({"capability": (12, 0)}, FLASH),
        ({"dropout": 0.1, "causal": True}, CUDNN),
        ({"mask": torch.zeros(16, 16)}, CUDNN),
        ({"key_heads": 2}, CUDNN),
        ({"key_length": 1}, FLASH),
        ({"head": 20}, FLASH),
        ({"dtype": torch.float32}, EFFICIENT),
    ],
)
def test_default_priorities(arguments: Any, expected: SDPBackend) -> None:
    """Hopper and the Blackwell of data centres prefer cuDNN where it can do it, as an H100 did with PyTorch 2.11."""
    assert chosen(**arguments) == expected


def test_what_the_job_has_ordered_stays() -> None:
    """An order of priority that the job has set is not changed."""
    with sdpa_kernel([EFFICIENT, CUDNN], set_priority=True):
        assert chosen() == EFFICIENT


def test_deterministic_kernels() -> None:
    """A job that wants deterministic kernels only does not get cuDNN's; one that wants a warning does."""
    for warn_only, expected in ((True, CUDNN), (False, FLASH)):
        torch.use_deterministic_algorithms(True, warn_only=warn_only)
        try:
            assert chosen() == expected
        finally:
            torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({}, CUDNN),
        ({"mask": torch.zeros(16, 16)}, CUDNN),
        ({"key_heads": 2}, CUDNN),
        ({"dropout": 0.1}, CUDNN),
        ({"head": 256}, CUDNN),
        ({"head": 256, "capability": AMPERE}, FLASH),
        ({"head": 20}, FLASH),
        ({"dtype": torch.float32}, EFFICIENT),
    ],
)
def test_priorities_of_the_job(arguments: Any, expected: SDPBackend) -> None:
    """A job's own order decides among the kernels that can do it."""
    with sdpa_kernel(TITAN, set_priority=True):
        assert chosen(**arguments) == expected


def test_only_enabled_kernels() -> None:
    """`sdpa_kernel` leaves only what it names; if that cannot do it, there is an error as on CUDA."""
    for backend in (FLASH, EFFICIENT, CUDNN, MATH):
        with sdpa_kernel(backend):
            assert chosen() == backend
    with sdpa_kernel(FLASH), pytest.raises(RuntimeError, match="No available kernel"):
        chosen(torch.float32)


def test_layout() -> None:
    """Three dimensions, or values that are not contiguous in the head, leave only math."""
    attention = Attention(TargetGPU())
    flat = torch.zeros(4, 16, 64, dtype=torch.bfloat16)
    assert attention.choose(flat, flat, flat, None, 0.0, False) == MATH
    q = torch.zeros(2, 4, 16, 16, dtype=torch.bfloat16)
    assert attention.choose(q, q, q.transpose(-1, -2), None, 0.0, False) == MATH


@pytest.mark.parametrize(
    ("mask", "expected"),
    [
        (torch.zeros(2, 1, 16, 16), CUDNN),
        (torch.zeros(2, 1, 16, 1).expand(2, 1, 16, 16), MATH),
        (torch.zeros(16, 1).expand(16, 16), MATH),
        (torch.zeros(2, 4, 1, 16).expand(2, 4, 16, 16), CUDNN),
        (torch.zeros(1, 4, 16, 16, requires_grad=True), EFFICIENT),
        (torch.zeros(4, 16, 16), EFFICIENT),
    ],
)
def test_masks(mask: torch.Tensor, expected: SDPBackend) -> None:
    """One that repeats a column leaves only math; cuDNN wants 2 or 4 dimensions and no gradient."""
    assert chosen(mask=mask) == expected


@pytest.mark.parametrize(
    ("head", "dropout", "expected"),
    [(192, 0.0, FLASH), (224, 0.0, EFFICIENT), (256, 0.0, FLASH), (256, 0.1, EFFICIENT)],
)
def test_wide_heads_in_training_on_little_shared_memory(head: int, dropout: float, expected: SDPBackend) -> None:
    """Ada has no flash backward for heads of 193 to 224, nor for wider ones with dropout; without gradients all run."""
    attention = Attention(TargetGPU(compute_capability=(8, 9)))
    q = torch.zeros(2, 4, 16, head, dtype=torch.bfloat16, requires_grad=True)
    assert attention.choose(q, q, q, None, dropout, False) == expected
    with torch.no_grad():
        assert attention.choose(q, q, q, None, dropout, False) == FLASH


def test_a_mask_with_rows_at_odd_places_is_padded() -> None:
    """Rows begin at multiples of 8 elements (`preprocess_mask`): in a padded copy, if they do not already."""
    whole = torch.rand(4, 24)
    assert aligned_mask(whole) is whole
    odd = torch.rand(4, 21)
    padded = aligned_mask(odd)
    assert torch.equal(padded, odd) and padded.stride() == (32, 1)


class Called(TorchDispatchMode):
    """The attention operators that run, with whether they were given a mask, their causality and scale."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[str, tuple[int, ...], Any, Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Note it, then do it."""
        kwargs = kwargs or {}
        if "attention" in str(func):
            name = func._overloadpacket.__name__.removeprefix("_scaled_dot_product_").removesuffix("_attention")
            named = dict(zip((a.name for a in func._schema.arguments), args, strict=False)) | kwargs
            mask = named.get("attn_bias", named.get("attn_mask"))
            self.calls.append(
                (name, tuple(args[0].shape), None if mask is None else tuple(mask.shape), kwargs.get("scale"))
            )
        return func(*args, **kwargs)


@pytest.mark.parametrize(
    ("backend", "head", "mask", "scale", "expected"),
    [
        (FLASH, 64, None, None, ("flash", (2, 4, 16, 64), None, 0.125)),
        (FLASH, 20, None, None, ("flash", (2, 4, 16, 24), None, 20**-0.5)),
        (FLASH, 64, None, 2.0, ("flash", (2, 4, 16, 64), None, 2.0)),
        (EFFICIENT, 64, torch.bool, 2.0, ("efficient", (2, 4, 16, 64), (2, 4, 16, 16), 2.0)),
        (EFFICIENT, 64, None, None, ("efficient", (2, 4, 16, 64), None, None)),
        (CUDNN, 64, torch.bfloat16, 3.0, ("cudnn", (2, 4, 16, 64), (16, 16), 3.0)),
    ],
)
def test_the_chosen_kernel_runs(
    backend: SDPBackend, head: int, mask: Any, scale: float | None, expected: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With padded heads, a mask for every head where the kernel wants one, and the usual scale where none is given."""
    attention = Attention(TargetGPU(compute_capability=HOPPER))
    monkeypatch.setattr(attention, "choose", lambda *_: backend)
    q, k, v = (torch.empty(2, 4, 16, head, dtype=torch.bfloat16, device="meta") for _ in range(3))
    given = None if mask is None else torch.empty(16, 16, dtype=mask, device="meta")
    with Called() as mode:
        out = attention(q, k, v, given, scale=scale)
    assert out.shape == (2, 4, 16, head)
    ((name, shape, masked, used),) = mode.calls
    assert (name, shape, masked) == expected[:3]
    assert used == (None if expected[3] is None else pytest.approx(expected[3]))


@pytest.mark.parametrize("scale", [None, 0.5])
def test_without_a_kernel_attention_is_computed(scale: float | None) -> None:
    """By products and a softmax, as PyTorch does on the CPU."""
    attention = Attention(TargetGPU(compute_capability=HOPPER))
    q, k, v = (torch.randn(2, 4, 16, 8, dtype=torch.float64) for _ in range(3))
    assert attention.choose(q, k, v, None, 0.0, False, False) == MATH
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale)
    assert torch.allclose(attention(q, k, v, is_causal=True, scale=scale), expected)
