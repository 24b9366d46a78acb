"""What the user can see of a training run, as plain values that compare bitwise.

A snapshot has six kinds: losses, gradients, parameters, buffers, random generators, and Python state (the public attributes
of the modules, and what the family adds). Names of parameters and modules have no level that a wrapper inserts.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

_LEVELS = frozenset({"_checkpoint_wrapped_module", "_orig_mod"})
KINDS = ("loss", "gradient", "parameter", "buffer", "rng", "python")


def frozen(value: Any, depth: int = 0) -> Any:
    """The value as nested tuples of bytes and scalars; two values are the same to a user if these are equal."""
    if isinstance(value, Tensor):
        return _tensor(value)
    if isinstance(value, np.ndarray):
        return ("array", str(value.dtype), value.shape, value.tobytes())
    if isinstance(value, torch.Generator):
        return ("generator", value.get_state().numpy().tobytes())
    if isinstance(value, np.random.Generator):
        return ("generator", repr(value.bit_generator.state))
    if isinstance(value, random.Random):
        return ("generator", value.getstate())
    if value is None or isinstance(value, bool | int | str | bytes | torch.dtype | torch.Size):
        return value
    if isinstance(value, float | complex):
        return repr(value)
    if depth < 6:
        if isinstance(value, list | tuple | deque):
            return tuple(frozen(item, depth + 1) for item in value)
        if isinstance(value, Mapping):
            return tuple((str(key), frozen(item, depth + 1)) for key, item in value.items())
    return type(value).__name__


def _tensor(value: Tensor) -> Any:
    value = value.detach()
    if hasattr(value, "to_local"):
        value = value.to_local()
    if value.layout != torch.strided:
        if value.layout == torch.sparse_coo:
            value = value.coalesce()
            return ("sparse", tuple(value.shape), _tensor(value.indices()), _tensor(value.values()))
        value = value.to_dense()
    if type(value) is not Tensor and type(value) is not nn.Parameter:
        value = value.as_subclass(Tensor)
    if value.numel() and not value.untyped_storage().nbytes():
        return ("freed", str(value.dtype), tuple(value.shape))  # by the older FSDP
    flat = value.resolve_conj().resolve_neg().contiguous().reshape(-1)
    if flat.is_complex():
        flat = torch.view_as_real(flat).reshape(-1)
    return (str(value.dtype), tuple(value.shape), flat.view(torch.uint8).numpy().tobytes())


def clean(name: str) -> str:
    """A module's or parameter's name without the levels of wrappers."""
    return ".".join(part for part in name.split(".") if part not in _LEVELS)


def bare(model: nn.Module) -> nn.Module:
    """The model inside DistributedDataParallel."""
    inner: Any
    while isinstance(model, nn.parallel.DistributedDataParallel) or "_orig_mod" in model._modules:
        inner = model.module if isinstance(model, nn.parallel.DistributedDataParallel) else model._orig_mod
        model = inner
    return model


def modules_of(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The model's own modules by clean name; wrappers around them are left out."""
    for name, module in bare(model).named_modules():
        if not _LEVELS & set(module._modules):
            yield clean(name), module


@dataclass
class Snapshot:
    """One moment of a run: for each of `KINDS` what there is, by name."""

    parts: dict[str, dict[str, Any]]

    def difference(self, other: Snapshot) -> tuple[str, str] | None:
        """The first kind and name whose value differs or is missing in `other`; additional attributes do not count."""
        for kind in KINDS:
            mine, theirs = self.parts[kind], other.parts[kind]
            for name, value in mine.items():
                if name not in theirs:
                    return kind, f"{name} is missing"
                if theirs[name] != value:
                    return kind, f"{name} differs"
            if kind in ("gradient", "parameter", "buffer", "loss"):
                for name in theirs:
                    if name not in mine:
                        return kind, f"{name} should not be there"
        return None

    def distance(self, other: Snapshot, tolerance: float = 1e-4) -> tuple[str, str] | None:
        """As `difference`, of losses, gradients and buffers, beyond what another order of sums explains."""
        for kind in ("loss", "gradient", "buffer"):
            mine, theirs = self.parts[kind], other.parts[kind]
            for name, value in mine.items():
                if name not in theirs or not _nearly(value, theirs[name], tolerance):
                    return kind, f"{name} differs by more than rounding"
        return None


def _nearly(a: Any, b: Any, tolerance: float) -> bool:
    """Whether two frozen float32 tensors agree to this share of their largest element."""
    if a == b:
        return True
    if not (isinstance(a, tuple) and isinstance(b, tuple) and a[:2] == b[:2] and a[0] == "torch.float32"):
        return False
    x, y = (np.frombuffer(value[2], np.float32) for value in (a, b))
    return bool(np.abs(x - y).max(initial=0) <= tolerance * max(np.abs(x).max(initial=0), 1e-6))


def rng_state() -> dict[str, Any]:
    """The state of the three global random generators."""
    legacy: Any = np.random.get_state()  # noqa: NPY002
    return {
        "torch": torch.get_rng_state().numpy().tobytes(),
        "python": random.getstate(),
        "numpy": (legacy[1].tobytes(), *legacy[2:]),
    }


def snapshot(model: nn.Module, batch: Any, losses: Any, state: Any) -> Snapshot:
    """What can be seen after a step's backward. `batch`: its tensors and their gradients count as Python state."""
    inner = bare(model)
    gradients, parameters = {}, {}
    for name, parameter in inner.named_parameters():
        name = clean(name)
        parameters[name] = frozen(parameter)
        if parameter.grad is not None:
            gradients[name] = frozen(parameter.grad)
    for i, tensor in enumerate(_tensors(batch)):
        if tensor.is_leaf and tensor.requires_grad and tensor.grad is not None:
            gradients[f"argument {i}"] = frozen(tensor.grad)
    python = {"state": frozen(state)}
    for i, tensor in enumerate(_tensors(batch)):
        python[f"argument {i}"] = frozen(tensor)
    for name, module in modules_of(model):
        for attribute, value in vars(module).items():
            if (
                not attribute.startswith("_")
                and not isinstance(value, nn.Module | nn.Parameter)
                and not callable(value)
            ):
                python[f"{name}.{attribute}"] = frozen(value)
    return Snapshot(
        {
            "loss": {str(i): frozen(loss) for i, loss in enumerate(losses)},
            "gradient": gradients,
            "parameter": parameters,
            "buffer": {clean(name): frozen(buffer) for name, buffer in inner.named_buffers()},
            "rng": rng_state(),
            "python": python,
        }
    )


def _tensors(batch: Any) -> Iterator[Tensor]:
    from benchmarks.fuzz.family import tensors_of

    yield from tensors_of(batch)
