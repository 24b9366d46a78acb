"""The same kinds of calls, priced by models that are fitted to a sweep of the same GPU, as `autosac calibrate` would."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from autosac.estimator import load_hardware
from autosac.estimator.calibration.campaign import fitted_groups
from autosac.estimator.calibration.fitted import Calibrated, CalibratedOperators, load_calibrated
from autosac.estimator.calibration.shapes import shape_of
from autosac.estimator.models import first_estimates
from autosac.estimator.pricing import default_models
from autosac.trace import Scalar, Signature, TensorMeta
from benchmarks.step_kinds.evidence import Kind

_TENSOR = re.compile(r"(\w+)\[([\d, ]*)\]\[([\d, -]*)\](?:@(\w+))?")
_KEY = re.compile(r"(?P<name>[\w.]+)\((?P<inputs>.*?);(?P<arguments>.*)\)->(?P<outputs>.*)", re.DOTALL)


def signature_of(key: str) -> Signature:
    """The signature behind a key of measured operators (`estimator/profiled.py`); which inputs are written is not in it."""
    parts = _KEY.fullmatch(key)
    if parts is None:
        raise ValueError(f"{key[:120]} is not the key of an operator")
    return Signature(
        parts["name"], _tensors(parts["inputs"]), _tensors(parts["outputs"]), _arguments(parts["arguments"])
    )


def _tensors(text: str) -> tuple[TensorMeta, ...]:
    return tuple(
        TensorMeta(_numbers(shape), _numbers(stride), dtype, place or "device")
        for dtype, shape, stride, place in _TENSOR.findall(text)
    )


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(number) for number in text.split(",") if number.strip())


def _arguments(text: str) -> tuple[tuple[str, Scalar], ...]:
    """`name=value` pairs; a name may be one of Python's keywords."""
    call = ast.parse(f"f({re.sub(r'(^|,)(?=[a-z_]+=)', lambda m: m[0] + '_', text)})", mode="eval").body
    assert isinstance(call, ast.Call)
    return tuple((str(word.arg)[1:], ast.literal_eval(word.value)) for word in call.keywords)


def fitted(measured: Path) -> Calibrated:
    """Models of the operators in this file, over the rates that the calibration found, which lie beside it."""
    plain = load_calibrated(str(measured.with_name(measured.name.replace(".measured.", ".calibrated."))))
    rows = []
    for key, ms, _ in json.loads(measured.read_text(encoding="utf-8"))["operators"]:
        shape = shape_of(signature_of(key))
        if shape is not None:
            rows.append((shape, float(ms)))
    return replace(plain, groups=fitted_groups(rows, plain))


def prices_us(kinds: Sequence[Kind], calibrated: Calibrated, gpu: str) -> list[float]:
    """The kinds' prices, with the shipped models behind."""
    prices: dict[int, float] = {}
    for tf32 in (False, True):
        mine = [i for i, kind in enumerate(kinds) if kind.tf32 is tf32]
        models = (CalibratedOperators(calibrated, tf32=tf32), *default_models(load_hardware(gpu), tf32=tf32).operators)
        answers = first_estimates(models, [kinds[i].signature for i in mine])
        prices |= {i: answer.ms * 1e3 for i, answer in zip(mine, answers, strict=True)}
    return [prices[i] for i in range(len(kinds))]
