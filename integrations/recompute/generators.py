"""The states of random generators, noted before an operator draws from them and set again when it runs once more."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from autosac.integrations.operators.keys import tensors_in


class GeneratorStates:
    """States of what one operator may draw from: its own generator (`generator=`), else those of the CPU and its device."""

    __slots__ = ("_devices", "_generator", "_state")

    def __init__(self, generator: torch.Generator | None, devices: set[torch.device]) -> None:
        self._generator = generator
        self._devices = sorted(devices, key=str)
        self._state = self._read()

    @contextmanager
    def restored(self) -> Iterator[None]:
        """The noted states; afterwards those of before."""
        now = self._read()
        self._set(self._state)
        try:
            yield
        finally:
            self._set(now)

    def _read(self) -> list[torch.Tensor]:
        if self._generator is not None:
            return [self._generator.get_state()]
        return [torch.get_rng_state(), *(torch.get_device_module(d).get_rng_state(d) for d in self._devices)]

    def _set(self, states: list[torch.Tensor]) -> None:
        if self._generator is not None:
            self._generator.set_state(states[0])
            return
        torch.set_rng_state(states[0])
        for device, state in zip(self._devices, states[1:], strict=True):
            torch.get_device_module(device).set_rng_state(state, device)


def states_before(args: tuple[Any, ...], kwargs: dict[str, Any]) -> GeneratorStates:
    """The states before an operator with these arguments runs."""
    generator = kwargs.get("generator")
    if generator is None:
        generator = next((a for a in args if isinstance(a, torch.Generator)), None)
    devices = {t.device for t in tensors_in((args, kwargs))}
    if isinstance(device := kwargs.get("device"), torch.device):
        devices.add(device)
    return GeneratorStates(generator, {d for d in devices if d.type not in ("cpu", "meta")})
