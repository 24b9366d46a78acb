"""A profile corrected by the first steps of a run: what is told from sums, the record's file, the profile's keys."""

from __future__ import annotations

import json
import math
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pinned import check, lines_of

from autosac.cli.parser import main
from autosac.errors import HardwareError, UsageError
from autosac.estimator import load_hardware, price
from autosac.estimator.calibration.runs import parts_of
from autosac.jobs.runs import learn, measured_target, replan, simulate_capture, write_profile
from autosac.plans import Plan, Settings
from autosac.runs import Predicted, RunMemory, RunRecord, UnitTimes
from autosac.simulation import Simulation, simulation_of
from autosac.trace import Op, Phase, Signature, TensorMeta, Trace
from plans import MADE_FOR, prediction
from traces import trace_of

GPU = "h100-sxm-80gb"


def _matrix(rows: int, columns: int) -> TensorMeta:
    return TensorMeta((rows, columns), (columns, 1), "bfloat16")


def _product(rows: int, width: int) -> Signature:
    a, b = _matrix(rows, width), _matrix(width, width)
    return Signature("aten.mm.default", (a, b), (a,))


def _wave(rows: int, width: int) -> Signature:
    return Signature("aten.sin.default", (_matrix(rows, width),), (_matrix(rows, width),))


def step(rows: int = 8192) -> Trace:
    """Two layers of a product and three sines, forward and backward; an output of one product; an optimizer of sines."""
    signatures = [_product(rows, 4096), _wave(rows, 4096), _product(rows, 8192), _wave(rows, 8192)]
    layer, events = [0, 1, 1, 1], []

    def op(signature: int, module: int, phase: Phase) -> Op:
        return Op(signature, 0, module, phase, 0, (-1,) * len(signatures[signature].inputs), (-1,))

    for phase in (Phase.FORWARD, Phase.BACKWARD):
        for module in (1, 2):
            events += [op(s, module, phase) for s in layer * (1 + (phase is Phase.BACKWARD))]
        events += [op(2, 3, phase)]
    events += [op(3, 0, Phase.OPTIMIZER)]
    return trace_of(events, signatures=signatures, modules=("", "layers.0", "layers.1", "out"), model="made")


def simulated(trace: Trace) -> Simulation:
    """On a GPU of the shipped profile."""
    return simulation_of(trace, measured_target(GPU, 1))


def record_of(simulation: Simulation, product: float, wave: float, noise: float = 0.0) -> RunRecord:
    """What a machine would measure on which products and sines take so many times as long."""
    source = random.Random(1)
    names = ["layers.0", "layers.1", "out"]
    parts = parts_of(
        simulation.trace, simulation.timeline.ranks[0], simulation.pricing.event_ms, simulation.step_ms, names
    )
    factor = {
        s: product if row.name == "aten.mm.default" else wave for s, row in enumerate(simulation.trace.signatures)
    }

    def ms(unit: str, part: str) -> float:
        found = parts[unit, part]
        more = sum((factor[s] - 1) * each for s, each in found.operators_ms.items())
        return (found.span_ms + more) * math.exp(source.gauss(0, noise))

    units = tuple(UnitTimes(fqn=n, forward_ms=ms(n, "forward"), backward_ms=ms(n, "backward")) for n in names)
    total = sum(u.forward_ms + (u.backward_ms or 0) for u in units) + ms("", "rest")
    return RunRecord(
        device="cuda", device_name="NVIDIA H100", gpu=GPU, steps_ms=(total, total * 1.01, total), units=units
    )


def test_the_parts_of_a_step_add_up() -> None:
    """Forward and backward of each module and the rest, and nothing else, are the step."""
    simulation = simulated(step())
    pricing, timeline = simulation.pricing, simulation.timeline.ranks[0]
    parts = parts_of(simulation.trace, timeline, pricing.event_ms, simulation.step_ms, ["layers.1", "out"])
    assert set(parts) == {
        ("layers.1", "forward"),
        ("layers.1", "backward"),
        ("out", "forward"),
        ("out", "backward"),
        ("", "rest"),
    }
    assert sum(part.span_ms for part in parts.values()) == pytest.approx(simulation.step_ms)
    spent = sum(sum(part.operators_ms.values()) for part in parts.values())
    assert spent == pytest.approx(pricing.event_ms.sum())
    assert set(parts["out", "forward"].operators_ms) == {2}


@pytest.mark.parametrize(("product", "wave"), [(1.0, 1.0), (1.5, 1.5), (2.0, 0.7), (0.8, 1.6)])
def test_corrected_parts_are_as_measured(tmp_path: Path, product: float, wave: float) -> None:
    """Of the job that was measured within 4 %, and of one with half of its tokens within 12 %."""
    simulation = simulated(step())
    record = record_of(simulation, product, wave, noise=0.01)
    learned = learn(record, simulation)
    assert all(part.corrected_ms == pytest.approx(part.measured_ms, rel=0.04) for part in learned.parts if part.name)
    write_profile(learned, simulation.target.hardware, GPU, tmp_path / "new.toml")
    for rows, allowed in ((8192, 0.04), (4096, 0.12)):
        other = simulated(step(rows))
        truth = record_of(other, product, wave).step_ms
        corrected = replace(other.target, hardware=load_hardware(str(tmp_path / "new.toml")))
        assert other.on(corrected).step_ms == pytest.approx(truth, rel=allowed)


@pytest.mark.parametrize(("later_ns", "alike"), [(0.0, 2), (0.4, 2), (0.6, 1)])
def test_layers_are_alike_to_the_nanosecond(later_ns: float, alike: int) -> None:
    """Two layers of which all operators take 1 ms count together, also if a product of one takes a bit longer."""
    known = simulated(step())
    ms = np.ones_like(known.pricing.event_ms)
    ms[4] += later_ns * 1e-6  # the product of the second layer's forward
    simulation = replace(known, other_prices=replace(known.pricing, event_ms=ms))
    found = learn(record_of(simulation, 1.0, 1.0), simulation)
    assert [part.alike for part in found.parts if part.name == "layers.0" and part.part == "forward"] == [alike]
    assert [part.alike for part in found.parts if part.part == "backward"] == [2, 1]


@pytest.mark.parametrize("seed", range(6))
def test_any_record_gives_finite_prices(tmp_path: Path, seed: int) -> None:
    """Modules that the job has not, or twice, times of nothing and of years, no modules at all: every price is a duration."""
    source, simulation = random.Random(seed), simulated(step(512))
    times = [0.0, 1e-12, 0.1, 1e15, None]
    units = tuple(
        UnitTimes(
            fqn=source.choice(["layers.0", "layers.1", "layers", "out", "none"]),
            forward_ms=source.choice(times[:-1]) or 0.0,
            backward_ms=source.choice(times),
        )
        for _ in range(source.randrange(6))
    )
    record = RunRecord(device="cuda", gpu=GPU, steps_ms=(source.choice([1e-9, 3.0, 1e15]),), units=units)
    write_profile(learn(record, simulation), simulation.target.hardware, GPU, tmp_path / "x.toml")
    prices = price(simulation.trace, load_hardware(str(tmp_path / "x.toml"))).event_ms
    assert np.isfinite(prices).all() and (prices > 0).all()


def test_a_run_that_agrees_corrects_nothing(tmp_path: Path) -> None:
    """Every price stays within 1 %, and operators of families that the run has not are the shipped models'."""
    simulation = simulated(step())
    write_profile(learn(record_of(simulation, 1, 1), simulation), simulation.target.hardware, GPU, tmp_path / "x.toml")
    hardware = load_hardware(str(tmp_path / "x.toml"))
    again = price(simulation.trace, hardware)
    assert again.event_ms == pytest.approx(simulation.pricing.event_ms, rel=0.01)
    gather = Signature("aten.embedding.default", (_matrix(100, 64), TensorMeta((9,), (1,), "int64")), (_matrix(9, 64),))
    trace = trace_of([Op(0, 0, 0, Phase.FORWARD, 0, (-1,), (-1,))], signatures=[gather])
    assert np.array_equal(price(trace, hardware).event_ms, price(trace, load_hardware(GPU)).event_ms)


def test_what_a_run_says_in_numbers(tmp_path: Path) -> None:
    """Products 30 % and sines 10 % slower than predicted, measured with noise: the corrected parts, and a record that JSON
    cannot hold.
    """
    simulation = simulated(step())
    found = learn(record_of(simulation, 1.3, 1.1, noise=0.2), simulation).parts
    rows = [
        [part.name, part.part, part.alike, part.predicted_ms, part.measured_ms, part.corrected_ms] for part in found
    ]
    check(Path(__file__).with_name("run.txt"), lines_of({str(n): row for n, row in enumerate(rows)}))
    with pytest.raises(ValueError, match="not JSON compliant"):
        replace(record_of(simulation, 1, 1), steps_ms=(math.inf,)).save(tmp_path / "run.json")


@pytest.mark.parametrize(("phase", "own_std"), [(Phase.FORWARD, 0.03), (Phase.OPTIMIZER, 0.3)])
def test_what_takes_time_beside_its_operators_says_less(phase: Phase, own_std: float) -> None:
    """Ten equal sines of a few us in a module's forward, or in the rest of the step, that the host issues too slowly.

    With one unknown c, prior variance P and s = d log(time) / dc, the posterior is greatest where c n is P s log(measured /
    corrected). The noise's variance n is that of the part and 0.3 times the share of its time beside the operators, squared.
    """
    op = Op(0, 0, 1, phase, 0, (-1,), (-1,))
    trace = trace_of([op] * 10, signatures=[_wave(1, 64)], modules=("", "layer"), model="made")
    simulation = simulated(trace)
    operators_ms, span_ms = float(simulation.pricing.event_ms.sum()), simulation.step_ms
    assert operators_ms < 0.8 * span_ms
    units = (UnitTimes(fqn="layer", forward_ms=1.2 * span_ms),) if phase is Phase.FORWARD else ()
    measured_ms = 1.2 * span_ms
    record = RunRecord(device="cuda", gpu=GPU, steps_ms=(measured_ms * (1.5 if units else 1.0),), units=units)
    learned = learn(record, simulation)
    ((_, c, _),) = learned.correction.observed
    (part,) = learned.parts
    beside_ms = span_ms - operators_ms
    assert part.corrected_ms == pytest.approx(beside_ms + operators_ms * math.exp(c))
    slope = operators_ms * math.exp(c) / part.corrected_ms
    prior = 0.04 + 0.05 + 0.05 + 0.02 + 0.02
    noise = prior * slope * math.log(measured_ms / part.corrected_ms) / c
    assert noise == pytest.approx(own_std**2 + (0.3 * beside_ms / span_ms) ** 2, rel=1e-4)


def test_memory_that_was_not_simulated_counts_from_then_on(tmp_path: Path) -> None:
    """The peaks of the next simulations are as much higher."""
    simulation = simulated(step())
    peaks = RunMemory(
        peak_active_bytes=simulation.peak_active_bytes + 2**20,
        peak_reserved_bytes=simulation.peak_reserved_bytes + 2**22,
    )
    record = replace(record_of(simulation, 1, 1), memory=peaks)
    write_profile(learn(record, simulation), simulation.target.hardware, GPU, tmp_path / "x.toml")
    after = simulation.on(replace(simulation.target, hardware=load_hardware(str(tmp_path / "x.toml"))))
    assert (after.peak_active_bytes, after.peak_reserved_bytes) == (peaks.peak_active_bytes, peaks.peak_reserved_bytes)
    assert after.allocation.context_bytes == simulation.allocation.context_bytes + 2**22
    write_profile(
        learn(replace(record, memory=None), simulation),
        after.target.hardware,
        str(tmp_path / "x.toml"),
        tmp_path / "y.toml",
    )
    assert load_hardware(str(tmp_path / "y.toml")).more_reserved_bytes == 2**22, (
        "a run without memory says nothing of it"
    )
    (tmp_path / "x.toml").write_text(f'base = "{GPU}"\nmore_active_bytes = 1.5\n')
    with pytest.raises(HardwareError, match="more_active_bytes must be a whole number"):
        load_hardware.__wrapped__(str(tmp_path / "x.toml"))


def test_from_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With a capture: a profile that corrects, and a report of the parts; what does not go together is wrong usage."""
    trace = step()
    trace.save(tmp_path / "step.trace")
    record_of(simulated(trace), 2.0, 1.0).save(tmp_path / "run.json")
    run = ["calibrate", str(tmp_path / "step.trace"), "--from-run", str(tmp_path / "run.json")]
    out = ["-o", str(tmp_path / "new.toml")]
    assert main([*run, *out, "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert {(part["name"], part["part"]): part["alike"] for part in document["parts"]}["layers.0", "forward"] == 2
    assert main([*run, *out]) == 0
    assert "The step by its parts" in capsys.readouterr().out
    for wrong, message in (
        ((*run, *out, "--sweep"), "--from-run measures nothing"),
        ((*run[:1], *run[2:], *out), "give its capture"),
        ((*run, "-o", str(tmp_path / "run.json")), "is also an input"),
        (("calibrate", *out, "--plan", "p.json"), "--plan names the plan that a run followed"),
    ):
        assert main(wrong) == 2
        assert message in capsys.readouterr().err


def test_a_record_is_read_as_it_was_written(tmp_path: Path) -> None:
    """Every field; its comparison is one line."""
    record = RunRecord(
        device="cuda",
        job="j.toml",
        overrides=("--a", "b"),
        world_size=8,
        warm_up=2,
        steps_ms=(10.0, 30.0, 11.0, 12.0),
        units=(UnitTimes(fqn="a.b", forward_ms=1.0),),
        memory=RunMemory(peak_active_bytes=2**30, peak_reserved_bytes=3 * 2**30),
        predicted=Predicted(step_ms=10.0, peak_active_bytes=2**30, peak_reserved_bytes=2**31),
        budget_bytes=2**31,
    )
    record.save(tmp_path / "run.json")
    assert RunRecord.load(tmp_path / "run.json") == record
    assert record.step_ms == 11.5 and record.misses_budget
    assert record.compared() == (
        "11.5 ms a step (predicted 10.0 ms, +15.0%), peak 3.00 GiB (predicted 2.00 GiB, +50.0%)"
    )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"format": "autosac-plan"}, "is not the record of a run"),
        ({"schema": 2}, "has run schema 2"),
        ({"schema": True}, "has run schema True"),
        ({"steps_ms": []}, r"damaged: steps_ms"),
        ({"steps_ms": [0.0]}, r"damaged: steps_ms\[0\]"),
        ({"steps_ms": [-1.0]}, r"damaged: steps_ms\[0\]"),
        ({"steps_ms": ["1"]}, r"damaged: steps_ms\[0\] is '1': expected a finite number"),
        ({"steps_ms": None}, r"damaged: steps_ms"),
        ({"device": "tpu"}, r"damaged: device is 'tpu': expected cuda or cpu"),
        ({"world_size": 0}, r"damaged: world_size"),
        ({"units": [{"fqn": "", "forward_ms": 1.0}]}, r"damaged: units\[0\]\.fqn"),
        ({"units": [{"fqn": "a"}]}, r"forward_ms"),
        ({"units": [{"fqn": "a", "forward_ms": 1e16}]}, r"damaged: units\[0\]\.forward_ms"),
        ({"memory": {"peak_active_bytes": 1.5, "peak_reserved_bytes": 1}}, r"damaged: memory\.peak_active_bytes"),
        ({"predicted": []}, r"damaged: predicted"),
        ({"more": 1}, "more"),
    ],
)
def test_damaged_records(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    """Each is refused in one line that says where."""
    document = {"format": "autosac-run", "schema": 1, "device": "cpu", "steps_ms": [1.0], **changes}
    path = tmp_path / "run.json"
    path.write_text(json.dumps(document))
    with pytest.raises(UsageError, match=message) as caught:
        RunRecord.load(path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "content", [b"", b"{", b"\x00\xff", b"[1]", b'{"format": "autosac-run", "schema": NaN}', b"{" * 999]
)
def test_what_is_no_record(tmp_path: Path, content: bytes) -> None:
    """Not JSON, or none of ours: one line."""
    (tmp_path / "run.json").write_bytes(content)
    with pytest.raises(UsageError, match="not the record of a run"):
        RunRecord.load(tmp_path / "run.json")
    with pytest.raises(UsageError, match="cannot read"):
        RunRecord.load(tmp_path / "none.json")


def test_a_capture_of_more_ranks_keeps_them() -> None:
    """The machine has as many GPUs as the capture's job."""
    trace = replace(step(), info=replace(step().info, world_size=4))
    record = RunRecord(device="cuda", steps_ms=(1.0,))
    assert simulate_capture(record, GPU, trace, None).target.cluster.nodes >= 1


@pytest.mark.parametrize(
    ("before", "after"), [(("", True), ("full", True)), (("full", True), ("", True)), (("full", False), ("full", True))]
)
def test_a_running_job_keeps_whoever_checkpoints_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, before: tuple[str, bool], after: tuple[str, bool]
) -> None:
    """A new plan that is TorchTitan's own checkpointing, or no longer, or stops early, is not changed to, however fast."""

    def plan_of(own: tuple[str, bool], step_ms: float) -> Plan:
        settings = Settings(job_checkpointing=own[0], early_stop=own[1])  # type: ignore[arg-type]
        return Plan(made_for=MADE_FOR, units=(), settings=settings, predictions={"autosac": prediction(step_ms, 1)})

    record = RunRecord(device="cuda", job="job.toml", gpu=GPU, steps_ms=(10.0,))
    monkeypatch.setattr("autosac.jobs.runs.simulate_run", lambda *_: simulated(step()))
    monkeypatch.setattr("autosac.jobs.runs.learn", lambda *_: None)
    monkeypatch.setattr("autosac.jobs.runs.write_profile", lambda *_: None)
    monkeypatch.setattr("autosac.jobs.runs.plan_job", lambda **_: plan_of(after, 1e-9))
    profile = tmp_path / "profile.toml"
    profile.write_text(f'base = "{GPU}"\n')
    found = replan(record, plan_of(before, 10.0), profile, budget="1GiB")
    assert found.plan is None and "changes how TorchTitan checkpoints by itself" in found.why
