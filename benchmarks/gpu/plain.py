"""Llama in plain PyTorch, each checkpointing policy for real beside its prediction, through AutoSAC's own harness.

    python -m benchmarks.gpu.plain --profile PROFILE.toml --device cuda --out DIR [--minutes 8]

Models: Llama-3.2-1B and 3B and an 8B cut to eight layers (with ``--device cpu``, a tiny one), with batches for the device's
memory. Policies: none, full, selective-op, and AutoSAC's plans for three budgets: a quarter, a half and three quarters of
the way from the predicted peak of "full" to that of "none", or to the device's memory where "none" does not fit. Writes
``plain.json``; a model that no time is left for is listed in it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from autosac.bench.measure import Measurement, check_measurable
from autosac.bench.policies import Policy
from autosac.bench.results import PolicyRow
from autosac.bench.run import run_suite
from autosac.bench.suite import Configuration, Model, Suite
from autosac.errors import AutosacError
from autosac.estimator import load_hardware
from benchmarks.gpu.common import ROOT, parse_arguments, write_result

_LLAMA = str(ROOT / "benchmarks" / "table_5_5" / "llama.py") + ":make_step"
_FIXED = ("none", "full", "selective-op")
_SHARES = (0.25, 0.5, 0.75)
_FILLED = 0.95  # of the device's memory may be planned for
_GIB = 2**30
# Name: sizes, and the activations of a sequence of 4096 tokens without checkpointing, roughly, to choose a batch size.
_SIZES: dict[str, tuple[dict[str, int], float, float]] = {
    "Llama 1B": ({}, 9.3, 6.0),
    "Llama 3B": ({"layers": 28, "dim": 3072, "heads": 24}, 24.0, 10.5),
    "Llama 8B, 8 layers": ({"layers": 8, "dim": 4096, "ffn_dim": 14336}, 18.0, 8.5),
}
_TINY = {"layers": 4, "dim": 64, "heads": 4, "kv_heads": 2, "ffn_dim": 192, "vocabulary": 256}


def models(device: str, total_bytes: int) -> list[Model]:
    """The models, with a batch size for this much memory: what "none" takes is about what there is."""
    if device == "cpu":
        return [_model("Llama tiny", _TINY | {"batch_size": 4, "seq_len": 64}, "float32")]
    found = []
    for name, (sizes, sequence_gib, state_gib) in _SIZES.items():
        batch = max(1, int((total_bytes / _GIB * 0.85 - 1.7 * state_gib) / sequence_gib))
        found.append(_model(name, sizes | {"batch_size": batch, "seq_len": 4096}, "bfloat16"))
    return found


def _model(name: str, arguments: dict[str, int], dtype: str) -> Model:
    values: tuple[tuple[str, Any], ...] = (*arguments.items(), ("dtype", dtype))
    label = f"batch {arguments['batch_size']} x {arguments['seq_len']}"
    return Model(
        name=name,
        make_step=_LLAMA,
        blocks=("layers.*",),
        configurations=(Configuration(name=label, arguments=values),),
    )


def run_model(
    model: Model, profile: str, measurement: Measurement, folder: Path, found: Callable[[PolicyRow], None]
) -> None:
    """The fixed policies of one model, then the plans; `found` gets every row as soon as there is one."""
    kind = "reserved" if measurement.device == "cuda" else "active"
    total = load_hardware(profile).usable_bytes
    suite = Suite(
        name="real steps",
        models=(model,),
        budgets=("85%",),
        policies=tuple(Policy(name) for name in _FIXED),
        gpu=profile,
        budget_kind=kind,
        alloc_conf="expandable_segments:True",
        time_limit_s=10.0,
        folder=folder,
    )
    results, _ = run_suite(suite, folder, _say, measurement, found)
    peaks = {row.policy: _peak(row, kind) for row in results.rows}
    low, high = peaks["full"], min(peaks["none"] or total, int(_FILLED * total))
    if low is None or low >= high:
        return
    budgets = tuple(f"{(low + share * (high - low)) / _GIB:.6f}GiB" for share in _SHARES)
    run_suite(replace(suite, budgets=budgets, policies=(Policy("knapsack"),)), folder, _say, measurement, found)


def _peak(row: PolicyRow, kind: str) -> int | None:
    return row.peak_reserved_bytes if kind == "reserved" else row.peak_active_bytes


def _say(text: str) -> None:
    print(text, flush=True)


def main() -> None:
    """Run all models, write after each."""
    arguments = parse_arguments(__doc__ or "")
    until = time.monotonic() + 60 * arguments.minutes
    measurement = Measurement(device=arguments.device, steps=5, time_limit_s=120)
    rows: list[dict[str, Any]] = []

    def found(row: PolicyRow) -> None:
        rows.append(asdict(row))
        write_result(arguments.out / "plain.json", arguments.device, rows)
        if time.monotonic() > until:
            raise AutosacError("the time ran out")

    for model in models(arguments.device, load_hardware(arguments.profile).usable_bytes):
        check_measurable(
            Suite(name="check", models=(model,), budgets=("85%",), policies=(Policy("none"),)), measurement
        )
        if time.monotonic() > until:
            rows.append({"model": model.name, "error": "the time ran out"})
        else:
            try:
                run_model(model, arguments.profile, measurement, arguments.out, found)
            except AutosacError as e:
                rows.append({"model": model.name, "error": str(e)})
        write_result(arguments.out / "plain.json", arguments.device, rows)


if __name__ == "__main__":
    main()
