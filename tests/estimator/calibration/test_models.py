"""Gaussian processes, shapes, and the file of calibrated models."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autosac.errors import HardwareError
from autosac.estimator import AlphaBeta, Placement, load_hardware
from autosac.estimator.calibration import Calibrated, CalibratedCollectives, CalibratedOperators, load_calibrated
from autosac.estimator.calibration.gaussian import GaussianProcess, fit_gaussian
from autosac.estimator.calibration.host import FIELDS, Probe, fit_host, nonnegative_least_squares
from autosac.estimator.calibration.host_memory import HostMemory
from autosac.estimator.calibration.shapes import shape_of
from autosac.files.schema import fitted
from autosac.runtime_sim.host import HostModel, host_costs
from autosac.trace import Event, ModuleEnter, ModuleExit, Op, Phase, Signature, TensorMeta
from traces import trace_of

PLACE = Placement(
    ranks=2,
    nodes=1,
    ranks_per_node=2,
    racks=1,
    intra_gbps=100.0,
    intra_latency_us=1.0,
    inter_gbps=1.0,
    inter_latency_us=1.0,
)


def test_a_process_meets_its_points_and_returns_to_the_mean() -> None:
    """A smooth function is met at its points within 2 % of its range; far away stands the median."""
    x = np.linspace(0, 10, 30)[:, None]
    process = fit_gaussian(x, np.sin(x[:, 0]))
    assert np.abs(process.predict(x) - np.sin(x[:, 0])).max() < 0.02
    assert process.predict(np.array([[1e4]]))[0] == pytest.approx(np.median(np.sin(x[:, 0])))


def test_a_feature_that_does_not_vary_has_no_say() -> None:
    """Points that agree in a feature predict the same whatever that feature is."""
    rows = np.column_stack([np.arange(8.0), np.full(8, 3.0)])
    process = fit_gaussian(rows, np.arange(8.0))
    assert process.predict(np.array([[2.5, 3.0]])) == pytest.approx(process.predict(np.array([[2.5, 9.0]])), rel=1e-6)


@given(st.lists(st.tuples(st.floats(0, 30), st.floats(-2, 2)), min_size=1, max_size=12))
@settings(deadline=None, max_examples=25)
def test_any_points_can_be_fitted_and_stored(points: list[tuple[float, float]]) -> None:
    """Fits of any points are finite, and the same after a round trip through JSON."""
    rows = np.array([[x] for x, _ in points])
    process = fit_gaussian(rows, np.array([y for _, y in points]))
    again = fitted(json.loads(json.dumps(process.to_json())), GaussianProcess)
    assert isinstance(again, GaussianProcess)
    assert np.isfinite(process.predict(rows)).all()
    assert again.predict(rows) == pytest.approx(process.predict(rows), abs=0.05)


def test_nonnegative_least_squares() -> None:
    """A positive solution is found exactly; where the free one is negative, that column is zero."""
    rows = np.array([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]])
    assert nonnegative_least_squares(rows, rows @ [2.0, 3.0]) == pytest.approx([2.0, 3.0])
    assert nonnegative_least_squares(np.eye(2), np.array([1.0, -1.0])).tolist() == [1.0, 0.0]


def test_shape_of_a_product(op: Callable[..., Any], meta: Callable[..., Any]) -> None:
    """A product is described by the logarithms of its sizes, its layouts and its bias."""
    shape = shape_of(op("addmm.default", [meta((4,)), meta((8, 2)), meta((2, 4), stride=(1, 2))], [meta((8, 4))]))
    assert shape is not None and shape.groups == ("matmul:float32",)
    assert shape.features == (0.0, 3.0, 2.0, 1.0, 0.0, 2.0, 2.0)
    assert shape.flops == 2 * 8 * 2 * 4


def test_other_operators_are_known_by_name_and_by_family(op: Callable[..., Any], meta: Callable[..., Any]) -> None:
    """An elementwise operator has a group of its own and shares its family's; a view has none."""
    shape = shape_of(op("relu.default", [meta((4, 4))], [meta((4, 4))]))
    assert shape is not None and shape.groups == ("relu:float32", "family elementwise:float32")
    assert shape.features[0] == math.log2(2 * 64)
    view = op("view.default", [meta((4, 4))], [meta((16,))])._replace(is_view=True)
    assert shape_of(view) is None


def _calibrated(**changes: Any) -> Calibrated:
    flat = GaussianProcess(
        points=np.zeros((1, 6)), alpha=np.zeros(1), scales=np.full(6, 1e6), amplitude=1.0, mean=math.log(2), rel_std=0.1
    )
    return Calibrated(
        **{
            "device": "cpu",
            "overhead_ms": 0.001,
            "peak_flops": {"float32": 1e11},
            "bandwidth": 1e10,
            "groups": {"relu:float32": flat},
        }
        | changes
    )


def test_operators_of_a_measured_group(op: Callable[..., Any], meta: Callable[..., Any]) -> None:
    """The price is the roofline times what the process says; other operators are left to others."""
    relu = op("relu.default", [meta((1000,))], [meta((1000,))])
    priced, unknown = CalibratedOperators(_calibrated()).estimate([relu, relu._replace(name="aten.foo.default")])
    assert priced is not None and unknown is None
    assert priced.ms == pytest.approx(2 * (0.001 + 8000 / 1e10 * 1e3))
    assert (priced.source, priced.rel_std) == ("calibrated:relu", 0.1)


def test_collectives_between_measured_sizes() -> None:
    """Half way between two sizes in the logarithm is the geometric mean; beyond the largest its rate holds."""
    table = {("all_reduce", 2, 1000): 1.0, ("all_reduce", 2, 4000): 4.0}
    behind = AlphaBeta(load_hardware("h100-sxm-80gb"))
    model = CalibratedCollectives(_calibrated(collectives=table), behind)
    assert model.estimate("all_reduce", 2000, PLACE).ms == pytest.approx(2.0)
    assert model.estimate("all_reduce", 8000, PLACE).ms == pytest.approx(8.0)
    assert model.estimate("broadcast", 8000, PLACE) == behind.estimate("broadcast", 8000, PLACE)


def test_the_file_keeps_everything(tmp_path: Path) -> None:
    """Saved and loaded, the models are the same."""
    memory = HostMemory(fault_ns_per_byte=0.5, reuse_bytes=(1.0, 2.0), read_ns_per_byte=(0.1, 0.2))
    before = _calibrated(memory=memory, collectives={("send", 2, 8): 0.25})
    before.save(tmp_path / "m.json")
    after = load_calibrated(str(tmp_path / "m.json"))
    assert (after.memory, after.collectives, after.peak_flops) == (memory, before.collectives, before.peak_flops)
    assert after.groups["relu:float32"].mean == math.log(2)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"bandwidth": float("nan")}, "NaN is not a number"),
        ({"bandwidth": 0}, "bandwidth is 0: expected a number from 1e-30 to 1e"),
        ({"overhead_ms": None}, "overhead_ms is None: expected a number from 0 to 1e"),
        ({"collectives": [["send", 2, 8, float("nan")]]}, "NaN is not a number"),
        ({"groups": {"a": {"points": [[1.0]]}}}, "groups.a.alpha is missing"),
        ({"memory": {"fault_ns_per_byte": 1.0, "reuse_bytes": [], "read_ns_per_byte": []}}, "a list of at least 1"),
        (
            {"memory": {"fault_ns_per_byte": 1.0, "reuse_bytes": [1.0, 2.0], "read_ns_per_byte": [1.0]}},
            "memory: reuse_bytes and read_ns_per_byte do not fit together",
        ),
        ({"schema": 99}, "calibrate again"),
        ({"format": "else"}, "is not a file of calibrated models"),
    ],
)
def test_damaged_files_are_refused(tmp_path: Path, change: dict[str, Any], text: str) -> None:
    """NaN, zeros, missing parts and other formats end with one line."""
    path = tmp_path / "m.json"
    _calibrated().save(path)
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    load_calibrated.cache_clear()
    with pytest.raises(HardwareError, match=text) as error:
        load_calibrated(str(path))
    assert "\n" not in str(error.value)


def test_every_way_to_walk_memory_has_a_shape(op: Callable[..., Any], meta: Callable[..., Any]) -> None:
    """Vectorised, broadcast, strided and assembled (concatenated, padded) operands are told apart from vectorised ones."""
    x = meta((8, 16))
    vectorised = op("add.Tensor", [x, x], [x])
    others = [
        op("add.Tensor", [x, meta((16,))], [x]),
        op("add.Tensor", [x, meta((8, 16), stride=(1, 8))], [x]),
        op("cat.default", [x, x], [meta((16, 16))]),
        op("constant_pad_nd.default", [x], [meta((8, 20))]),
    ]
    plain = shape_of(vectorised)
    assert plain is not None
    for signature in others:
        shape = shape_of(signature)
        assert shape is not None and shape.features[2] > plain.features[2] == 0


def _probe(
    forward: int,
    backward: int,
    optimizer: int,
    views: int,
    modules: int,
    units: tuple[int, ...] = (),
    selective: bool = False,
) -> Probe:
    """A step with so many events of each kind; `units`: operators that each checkpointed module recomputes."""
    tensor = TensorMeta((4,), (1,), "float32")
    operator = Signature("aten.add.Tensor", (tensor,), (tensor,))
    view = Signature("aten.t.default", (tensor,), (tensor,), is_view=True)

    def issue(kind: int, count: int, phase: Phase, module: int = 0) -> list[Event]:
        return [Op(kind, 0, module, phase, 0, (), ())] * count

    events = [*issue(0, forward, Phase.FORWARD, 1), *issue(1, views, Phase.FORWARD)]
    events += [ModuleEnter(1, Phase.FORWARD), ModuleExit(1, Phase.FORWARD)] * modules
    for again in units:
        events += issue(0, 1, Phase.BACKWARD)
        events += [
            ModuleEnter(1, Phase.RECOMPUTE),
            *issue(0, again, Phase.RECOMPUTE, 1),
            ModuleExit(1, Phase.RECOMPUTE),
        ]
    events += [*issue(0, backward, Phase.BACKWARD), *issue(0, optimizer, Phase.OPTIMIZER)]
    trace = trace_of(events, signatures=(operator, view), modules=("", "a"))
    return Probe(lambda device: None, trace, ("a",) if selective else ())


def test_the_hosts_costs_are_found_again() -> None:
    """Steps that a host of known costs issues give these costs, plain, checkpointed and selective ones."""
    truth = dict(zip(FIELDS, (7.0, 5.0, 3.0, 2.0, 1.5, 40.0, 170.0, 20.0, 90.0), strict=True))
    probed = [
        _probe(10, 8, 0, 5, 2),
        _probe(30, 8, 0, 5, 2),
        _probe(10, 28, 0, 5, 2),
        _probe(10, 8, 20, 5, 2),
        _probe(10, 8, 0, 40, 2),
        _probe(10, 8, 0, 5, 60),
        _probe(10, 8, 0, 5, 2, (10,)),
        _probe(10, 8, 0, 5, 2, (1, 2, 3, 4)),
        _probe(12, 8, 0, 5, 2, (12,), selective=True),
        _probe(12, 8, 0, 5, 2, (4,), selective=True),
    ]
    operators = [0.25] * len(probed)
    host = HostModel(**truth)
    steps = [0.25 + float(host_costs(p.trace, host, p.selective).sum()) for p in probed]
    assert fit_host(probed, steps, operators) == pytest.approx(truth, abs=1e-3)
    assert set(fit_host(probed[:6], steps[:6], operators[:6])) == set(FIELDS[:5])
