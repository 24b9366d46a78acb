"""Measured operators: the first model to be asked, if the GPU's profile names a file of measurements.

The file is JSON: ``{"format": "autosac-measured", "schema": 1, "operators": [[key, ms, rel_std], ...]}``
where the key (`signature_key`) says everything that a signature's cost depends on. `save_measured` writes it,
`ProfiledModel` reads it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, NamedTuple

from autosac.estimator.models import Estimate
from autosac.estimator.profiles import read_document
from autosac.files.schema import STRICT, Within
from autosac.files.writing import write_text_atomically
from autosac.trace import Signature, TensorMeta

_FORMAT, _SCHEMA = "autosac-measured", 1
_LEAST_MS, _MOST_MS, _MOST_REL_STD = 1e-12, 1e9, 1e3


def _meta_key(meta: TensorMeta) -> str:
    return f"{meta.dtype}{list(meta.shape)}{list(meta.stride)}{'' if meta.place == 'device' else '@' + meta.place}"


def signature_key(signature: Signature) -> str:
    """A text that is equal for equal ways of calling an operator."""
    inputs = ",".join(map(_meta_key, signature.inputs))
    outputs = ",".join(map(_meta_key, signature.outputs))
    arguments = ",".join(f"{name}={value!r}" for name, value in signature.arguments)
    return f"{signature.name}({inputs};{arguments})->{outputs}"


class _Row(NamedTuple):
    """One operator: milliseconds, and their relative standard error."""

    key: str
    ms: Annotated[float, Within(_LEAST_MS, _MOST_MS)]
    rel_std: Annotated[float, Within(0, _MOST_REL_STD)]


@dataclass(frozen=True)
class _Measurements:
    """What the file holds."""

    __pydantic_config__: ClassVar[Any] = STRICT

    operators: tuple[_Row, ...]


class ProfiledModel:
    """Answers for the signatures that were measured, and for no others."""

    def __init__(self, measured: Mapping[str, tuple[float, float]]) -> None:
        """`measured`: signature key -> (milliseconds, relative standard error)."""
        self._measured = measured

    @staticmethod
    def load(path: str | Path) -> ProfiledModel:
        """Read a file of measurements.

        HardwareError if it is none or holds times that are not positive numbers.
        """
        found = read_document(path, "measured operators", _FORMAT, _SCHEMA, _Measurements)
        return ProfiledModel({row.key: (row.ms, row.rel_std) for row in found.operators})

    def estimate(self, signatures: Sequence[Signature]) -> list[Estimate | None]:
        """The measured time, where there is one."""
        found = [self._measured.get(signature_key(signature)) for signature in signatures]
        return [Estimate(hit[0], "profiled", hit[1]) if hit else None for hit in found]


def save_measured(path: str | Path, measured: Mapping[Signature, tuple[float, float]]) -> None:
    """Write measurements (milliseconds, relative standard error); the file appears whole or not at all."""
    operators = [[signature_key(signature), *values] for signature, values in measured.items()]
    document = {"format": _FORMAT, "schema": _SCHEMA, "operators": operators}
    write_text_atomically(Path(path), json.dumps(document))
