"""The interface of operator and collective cost models, and the order in which they are asked.

An `OperatorModel` is given the distinct signatures of a trace at once and answers each with an `Estimate`, or
with None where it does not know; the next model in order is asked for those (profiled, then learned, then
roofline, which knows everything). A `CollectiveModel` answers for one transfer at a time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from autosac.estimator.cluster import Placement
from autosac.runtime_sim import LinkUse
from autosac.trace import Signature
from autosac.trace.checks import IMPOSSIBLE_CALL, impossible_call


class Estimate(NamedTuple):
    """Device time of one operator or transfer, the model that said so, and its relative standard error (1 sigma).

    `use`: what a transfer takes of its GPUs' links, if the model says so.
    """

    ms: float
    source: str
    rel_std: float
    use: LinkUse | None = None


class OperatorModel(Protocol):
    """Predicts the device time of operators from their signatures."""

    def estimate(self, signatures: Sequence[Signature]) -> Sequence[Estimate | None]:
        """One answer for each signature; None where this model does not know."""


class CollectiveModel(Protocol):
    """Predicts the duration of a transfer between the ranks of a group, all of them ready."""

    def estimate(self, kind: str, nbytes: int, placement: Placement) -> Estimate:
        """`kind` and `nbytes` as in `autosac.trace.Collective`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Models:
    """Operator models in order of preference, the last of which knows everything, and a collective model."""

    operators: tuple[OperatorModel, ...]
    collectives: CollectiveModel


def first_estimates(models: Sequence[OperatorModel], signatures: Sequence[Signature]) -> list[Estimate]:
    """Every signature's answer from the first model that knows it. The last model must know all."""
    answers: list[Estimate | None] = [None] * len(signatures)
    open_ = list(range(len(signatures)))
    for model in models:
        for i, answer in zip(open_, _answers(model, [signatures[i] for i in open_]), strict=True):
            answers[i] = answer
        open_ = [i for i in open_ if answers[i] is None]
    assert not open_, f"no model knows {signatures[open_[0]].name}"
    return [answer for answer in answers if answer is not None]


def _answers(model: OperatorModel, signatures: Sequence[Signature]) -> Sequence[Estimate | None]:
    """The model's answers. SimulationError, which names the operator, if there is a call that cannot be."""
    try:
        return model.estimate(signatures)
    except IMPOSSIBLE_CALL as e:
        for signature in signatures:
            try:
                model.estimate([signature])
            except IMPOSSIBLE_CALL:
                raise impossible_call(signature) from e
        raise
