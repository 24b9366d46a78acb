"""The correction of shipped models: partial pooling, error bars, its file."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autosac.errors import HardwareError
from autosac.estimator import load_hardware
from autosac.estimator.calibration.traces.correction import (
    CorrectedOperators,
    CorrectedTransfers,
    Correction,
    Observed,
    collective_point,
    load_correction,
    operator_point,
)
from autosac.estimator.cluster import default_cluster
from autosac.estimator.models import Estimate, OperatorModel
from autosac.estimator.pricing import default_models
from autosac.trace import Signature, TensorMeta


class Flat:
    """A model that says 0.1 ms for everything."""

    def estimate(self, signatures: Sequence[Signature]) -> list[Estimate | None]:
        """The same for all."""
        return [Estimate(0.1, "flat", 0.2)] * len(signatures)


def _mm(m: int, n: int = 1024, k: int = 1024) -> Signature:
    def meta(*shape: int) -> TensorMeta:
        return TensorMeta(shape, (shape[1], 1), "bfloat16")

    return Signature("aten.mm.default", (meta(m, k), meta(k, n)), (meta(m, n),))


def _relu(elements: int) -> Signature:
    meta = TensorMeta((elements,), (1,), "bfloat16")
    return Signature("aten.relu.default", (meta,), (meta,))


def _observed(signature: Signature, ratio: float, variance: float = 1e-4) -> Observed:
    point = operator_point(signature, 0.1)
    assert point is not None
    return Observed(point, math.log(ratio), variance)


def _times(correction: Correction, signatures: Sequence[Signature], shipped: OperatorModel) -> list[Estimate | None]:
    return CorrectedOperators(correction, [shipped]).estimate(signatures)


def test_evidence_corrects_its_family_and_leaves_others_alone() -> None:
    """Products measured at twice the price are priced at nearly twice, also between the shapes; relu is not touched."""
    correction = Correction.fit([_observed(_mm(m), 2.0) for m in (256, 512, 2048, 4096)])
    seen, between, other = _times(correction, [_mm(512), _mm(1024), _relu(1000)], Flat())
    assert other is None
    for estimate in (seen, between):
        assert estimate is not None
        assert estimate.ms == pytest.approx(0.2, rel=0.1)
        assert estimate.source == "corrected:flat"


def test_the_error_bar_grows_and_the_correction_shrinks_away_from_the_evidence() -> None:
    """A shape far from all that was measured is corrected less, and with more doubt."""
    correction = Correction.fit([_observed(_mm(m), 2.0) for m in (4096, 4100, 4200, 8192)])
    near, far = _times(correction, [_mm(4096), _mm(1, 8, 2**20)], Flat())
    assert near is not None
    assert far is not None
    assert near.rel_std < far.rel_std
    assert abs(math.log(far.ms / 0.1)) < abs(math.log(near.ms / 0.1))


def test_one_doubtful_measurement_is_shrunk() -> None:
    """The less surely a ratio is known, the less of it is taken over."""
    sure = _times(Correction.fit([_observed(_mm(512), 3.0, 1e-4)]), [_mm(512)], Flat())[0]
    doubtful = _times(Correction.fit([_observed(_mm(512), 3.0, 1.0)]), [_mm(512)], Flat())[0]
    assert sure is not None
    assert doubtful is not None
    assert 0.1 == doubtful.ms < sure.ms < 0.3


@settings(deadline=None, max_examples=40)
@given(
    ratios=st.lists(st.floats(0.5, 2.0), min_size=1, max_size=12),
    size=st.integers(16, 8192),
)
def test_a_correction_never_overshoots_its_evidence(ratios: list[float], size: int) -> None:
    """Whatever was measured of one family, corrections lie between nothing and the furthest measurement."""
    observed = [_observed(_mm(64 << i % 7), ratio) for i, ratio in enumerate(ratios)]
    answer = _times(Correction.fit(observed), [_mm(size)], Flat())[0]
    assert answer is not None
    assert min(1.0, *ratios) * 0.1 - 1e-9 <= answer.ms <= max(1.0, *ratios) * 0.1 + 1e-9


def test_small_errors_of_one_job_are_not_carried_over() -> None:
    """Thirty shapes that all took 4 % longer leave another shape as it is; 40 % longer do not."""
    for ratio, changed in ((1.04, False), (1.4, True)):
        correction = Correction.fit([_observed(_mm(64 + 8 * i), ratio) for i in range(30)])
        answer = _times(correction, [_mm(1024)], Flat())[0]
        assert answer is not None
        assert (answer.ms > 0.105) is changed


def test_the_file_holds_the_whole_correction(tmp_path: Path) -> None:
    """What is loaded predicts what was saved."""
    correction = Correction.fit([_observed(_mm(m), 1.5) for m in (256, 1024)] + [_observed(_relu(4096), 0.5)])
    path = tmp_path / "c.json"
    correction.save(path)
    loaded = load_correction(str(path))
    signatures = [_mm(300), _relu(9999)]
    for before, after in zip(_times(correction, signatures, Flat()), _times(loaded, signatures, Flat()), strict=True):
        assert before is not None
        assert after is not None
        assert after.ms == pytest.approx(before.ms, rel=1e-3)
    assert loaded.families == {"matmul", "elementwise"}


@pytest.mark.parametrize(
    "change",
    [
        {"format": "other"},
        {"schema": 2},
        {"rows": []},
        {"rows": [["matmul", "mm", [1, 2], 0.1, 0.1]]},
        {"rows": [["matmul", "mm", [0.0] * 12, "x", 0.1]]},
        {"rows": [["matmul", "mm", [0.0] * 12, 0.1, 0.0]]},
        {"rows": 5},
        {"levels": {"machine": 1}},
    ],
)
def test_a_damaged_file_is_refused(tmp_path: Path, change: dict[str, object]) -> None:
    """On one line that names the file."""
    path = tmp_path / "c.json"
    Correction.fit([_observed(_mm(256), 1.5)]).save(path)
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(HardwareError) as error:
        load_correction(str(path))
    assert str(path) in str(error.value)
    assert "\n" not in str(error.value)


def test_nothing_cannot_be_fitted() -> None:
    """A correction needs evidence."""
    with pytest.raises(HardwareError, match="nothing to fit"):
        Correction.fit([])


def test_transfers_inside_a_node_are_corrected() -> None:
    """A collective of a kind with evidence is, of another kind or over several nodes it is not."""
    hardware = load_hardware("h100-sxm-80gb")
    behind = default_models(hardware).collectives
    cluster = default_cluster(hardware, 16)
    node, two_nodes = cluster.place(range(8)), cluster.place(range(16))
    plain = behind.estimate("all_reduce", 2**24, node).ms
    observed = Observed(collective_point("all_reduce", 2**24, 8, plain), math.log(0.5), 1e-4)
    model = CorrectedTransfers(Correction.fit([observed] * 3), behind)
    assert model.estimate("all_reduce", 2**24, node).ms == pytest.approx(plain / 2, rel=0.15)
    for kind, placement in (("all_gather", node), ("all_reduce", two_nodes)):
        assert model.estimate(kind, 2**24, placement) == behind.estimate(kind, 2**24, placement)


def test_tf32_products_are_an_operator_of_their_own() -> None:
    """What was measured on tensor cores does not correct plain float32."""
    meta = TensorMeta((64, 64), (64, 1), "float32")
    signature = Signature("aten.mm.default", (meta, meta), (meta,))
    plain, fast = operator_point(signature, 0.1), operator_point(signature, 0.1, tf32=True)
    assert plain is not None
    assert fast is not None
    assert (plain.operator, fast.operator) == ("mm:float32", "mm:tf32")
