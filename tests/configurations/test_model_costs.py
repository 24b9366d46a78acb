"""What the shapes of a model's parameters say of its layers' costs, by hand."""

from __future__ import annotations

import math

import pytest

from autosac.configurations.bounds.shapes import costs_of_parameters
from autosac.configurations.space.layout import Layout, ModelFacts


def test_parameters_tell_products() -> None:
    """One layer with a 4 x 8 matrix, an output of 16 x 4, 10 tokens, 1 kFLOP/s: 2 FLOP for each number and token."""
    shapes = {
        "layers.0.w.weight": (8, 4),
        "layers.0.norm.weight": (4,),
        "output.weight": (16, 4),
        "tok.weight": (16, 4),
    }
    found = costs_of_parameters(shapes, ModelFacts(layers=3, seq_len=10), Layout(gpu="any"), 1e3)
    assert found.layer.forward_ms == pytest.approx(32 * 20)
    assert found.layer.backward_ms == pytest.approx(2 * 32 * 20)
    assert found.last.forward_ms == pytest.approx(64 * 20)
    assert found.layer.kept == ((2 * 10 * 4, math.inf),)
    assert (found.layer_parameters, found.outside_parameters) == (36, 128)


def test_biases_are_no_products() -> None:
    """Those of eight experts are a matrix of 8 x 50, which is a part of the layer, but multiplied with nothing."""
    shapes = {"layers.0.w.weight": (8, 4), "layers.0.experts.w1_bias": (8, 50)}
    found = costs_of_parameters(shapes, ModelFacts(layers=1, seq_len=10), Layout(gpu="any"), 1e3)
    assert (found.layer.forward_ms, found.layer_parameters) == (pytest.approx(32 * 20), 432)


def test_parameters_tell_experts() -> None:
    """A dense layer of 100 numbers before 3 with a router of 4 x 8 and 8 experts of 5 x 6, two for each of 12 tokens: 3 tokens
    for each expert. On one rank a layer has the average of all, in a pipeline either kind has its own costs.
    """
    shapes = {
        "layers.0.w.weight": (10, 10),
        "layers.1.router.weight": (8, 4),
        "layers.1.experts.w1": (8, 5, 6),
    }
    facts = ModelFacts(layers=4, experts=8, active_experts=2, seq_len=12)
    sparse = 32 + 3 * 8 / 12 * 30
    for pipeline in (1, 2):
        found = costs_of_parameters(shapes, facts, Layout(gpu="any", pipeline=pipeline), 1e3, leading=1)
        usual = (100 + 3 * sparse) / 4 if pipeline == 1 else sparse
        assert found.layer.forward_ms == pytest.approx(usual * 2 * 12)
        assert found.layer_parameters == ((100 + 3 * 272) / 4 if pipeline == 1 else 272)
        assert (found.leading, found.layer_experts) == (pipeline - 1, 240)
        assert (found.lead.forward_ms, found.lead_parameters) == (pytest.approx(100 * 2 * 12), 100)
    few = costs_of_parameters(shapes, facts._replace(seq_len=3), Layout(gpu="any"), 1e3, leading=1)
    assert few.layer.forward_ms == pytest.approx((100 + 3 * 32) / 4 * 2 * 3)
