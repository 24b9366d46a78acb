"""Prices of 300 operators of real steps and of collectives, pinned: a change of any model or count shows here.

`operators.json` holds the operators (of convolutional networks, Llama-3, mixtures of experts, compiled graphs), `golden.json`
what they cost. ``AUTOSAC_UPDATE_GOLDEN=1 pytest tests/estimator/test_golden.py`` writes the prices anew; look at what changed
before committing.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from autosac.estimator import AlphaBeta, ChunkModel, FlowModel, LogSigmoid, load_cluster, load_hardware
from autosac.estimator.models import CollectiveModel, Estimate, first_estimates
from autosac.estimator.pricing import default_models
from autosac.estimator.work import work_of
from autosac.trace import Signature

GOLDEN = Path(__file__).with_name("golden.json")
GPUS = ("h100-sxm-80gb", "b200-sxm-180gb", "a40", "mi300x")  # fitted, fitted with other units, without a fit, of AMD
CLUSTERS = ("hgx-h100", "aws-p5", "meta-grand-teton", "hgx-mi300x")
GROUPS = {"alone": (0,), "pair": (0, 1), "node": range(8), "rails": range(0, 64, 8), "all": range(64)}
KINDS = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all", "broadcast", "send", "barrier")
SIZES = (512, 3 * 2**20, 2**30)
MODELS: tuple[type[Any], ...] = (FlowModel, LogSigmoid, ChunkModel, AlphaBeta)


def _check(section: str, found: dict[str, Any]) -> None:
    """Compare with what is pinned; times go through exp and log, whose last digits differ between processors."""
    document = json.loads(GOLDEN.read_text()) if GOLDEN.exists() else {}
    if os.environ.get("AUTOSAC_UPDATE_GOLDEN") == "1":
        document[section] = found
        GOLDEN.write_text(json.dumps(document, separators=(",", ":")).replace("]],", "]],\n") + "\n")
    pinned = document[section]
    assert found.keys() == pinned.keys()
    for key, rows in pinned.items():
        for number, (row, expected) in enumerate(zip(found[key], rows, strict=True)):
            assert row == pytest.approx(expected, rel=1e-5, abs=1e-12), (section, key, number)


def test_the_work_of_operators(operators: Sequence[Signature]) -> None:
    """Operations and bytes of each operator, with TF32 allowed and without."""
    found = {
        "float32" if not tf32 else "tf32": [
            [work.flops, work.nbytes, len(work.family), len(work.arithmetic)]
            for work in (work_of(signature, tf32=tf32) for signature in operators)
        ]
        for tf32 in (False, True)
    }
    _check("work", found)


@pytest.mark.parametrize("gpu", GPUS)
def test_the_prices_of_operators(operators: Sequence[Signature], gpu: str) -> None:
    """Time in microseconds and relative standard error of each operator, by the models that serve by default; and by the
    roofline alone.
    """
    found = {}
    for name, learned in (("learned", True), ("roofline", False)):
        models = default_models(load_hardware(gpu), learned=learned)
        found[name] = [
            [float(f"{1e3 * answer.ms:.7g}"), round(float(answer.rel_std), 6)]
            for answer in first_estimates(models.operators, operators)
        ]
    _check(gpu, found)


def _figures(answer: Estimate) -> tuple[float, ...]:
    use = () if answer.use is None else (answer.use.rate, answer.use.port, answer.use.adapter, answer.use.uplink)
    return tuple(float(f"{value:.7g}") for value in (1e3 * answer.ms, answer.rel_std, *use))


@pytest.mark.parametrize("cluster", CLUSTERS)
def test_the_prices_of_collectives(cluster: str) -> None:
    """Microseconds of every kind and size between every group of ranks, by every model, its error, and what it takes of links;
    the nodes of a rack share two uplinks.
    """
    machine = replace(load_cluster(cluster).sized(64), nodes_per_rack=2, uplinks_per_leaf=2)
    hardware = load_hardware("mi300x" if "mi300x" in cluster else "h100-sxm-80gb")
    found = {}
    for kind in MODELS:
        model: CollectiveModel = kind(hardware)
        found[kind.__name__] = [
            [
                figure
                for group in GROUPS.values()
                for nbytes in SIZES
                for figure in _figures(model.estimate(collective, nbytes, machine.place(tuple(group))))
            ]
            for collective in KINDS
        ]
    _check(cluster, found)
