"""What `autosac simulate --time` says of a step: which models served, the modules, the critical path."""

from __future__ import annotations

import json
from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console, RenderableType

from autosac.cli.parser import main
from autosac.estimator import Corrected, LogSigmoid, Pricing
from autosac.report.summaries import simulation_summary
from autosac.report.time_tables import links, served, served_line, time_document, time_tables
from autosac.runtime_sim import NoInterference
from autosac.simulation import Simulation, Target
from autosac.trace import Signature, TensorMeta, Trace


@pytest.fixture
def pricing() -> Pricing:
    """6 ms by one model (errors 10 and 40 %), 3 by the same scaled from another GPU, 1 by the roofline."""
    return Pricing(
        event_ms=np.array([4.0, 2.0, 3.0, 1.0, 0.0]),
        source=("learned:matmul", "learned:norm@h100-sxm-80gb", "roofline"),
        event_source=np.array([0, 0, 1, 2, -1], dtype=np.int16),
        event_rel_std=np.array([0.1, 0.4, 0.2, 0.5, 0.0], dtype=np.float32),
    )


def text(renderable: RenderableType) -> str:
    """As it is printed on a wide terminal."""
    out = StringIO()
    Console(width=160, file=out).print(renderable)
    return out.getvalue()


def test_which_model_served_how_much(pricing: Pricing) -> None:
    """Shares of the 10 ms, and errors weighted by time: (4 * 0.1 + 2 * 0.4) / 6 = 20 %."""
    rows = served(pricing)
    assert [(row.model, row.ms, row.share) for row in rows] == [
        ("learned:matmul", 6.0, 0.6),
        ("learned:norm@h100-sxm-80gb", 3.0, 0.3),
        ("roofline", 1.0, 0.1),
    ]
    assert [row.rel_std for row in rows] == pytest.approx([0.2, 0.2, 0.5])


def test_scaled_models_say_so(pricing: Pricing) -> None:
    """The one line of the summary names the GPU whose models were scaled, and how much they serve."""
    assert served_line(pricing) == "learned 90% (30% scaled from h100-sxm-80gb), roofline 10%"


@pytest.mark.parametrize(
    ("scaled", "roofline", "expected"),
    [
        (60.0, 6.0, "learned 100% (1% scaled from l40s), roofline 0%"),
        (40.0, 4.0, "learned 100%"),
        (60.0, 4.0, "learned 100% (1% scaled from l40s)"),
        (40.0, 6.0, "learned 100%, roofline 0%"),
    ],
)
def test_models_that_serve_next_to_nothing_are_left_out(scaled: float, roofline: float, expected: str) -> None:
    """Of 10,000 ms: models of less than half a tenth of a percent; from other GPUs, less than half a percent."""
    pricing = Pricing(
        event_ms=np.array([10_000.0 - scaled - roofline, scaled, roofline]),
        source=("learned:matmul", "learned:norm@l40s", "roofline"),
        event_source=np.array([0, 1, 2], dtype=np.int16),
        event_rel_std=np.zeros(3, dtype=np.float32),
    )
    assert served_line(pricing) == expected


def test_no_model_serves_an_empty_step() -> None:
    """Nothing has a price."""
    pricing = Pricing(
        event_ms=np.zeros(1), source=(), event_source=np.array([-1], np.int16), event_rel_std=np.zeros(1, np.float32)
    )
    assert served(pricing) == [] and served_line(pricing) == "nothing"


def test_the_critical_path_by_kind(job, run) -> None:
    """2 ms of product, then the gather that waits for it (5), then 1 more of product: 3, 5; nothing else."""
    step = job().op(2).collective(5, work=1).op(4).wait_work(1).op(1)
    found = links(run(step).critical_path(), {0: step.trace})
    assert [(link.what, link.number, link.ms) for link in found] == [("all_gather", 1, 5.0), ("mm", 2, 3.0)]
    assert found[1].reasons == {"launch": 2.0, "dependency": 1.0}


def test_links_add_up_to_the_step(job) -> None:
    """A step on a real GPU's profile: the critical path and the tables account for all of its time."""
    step = job().op(0).collective(0, work=1, module=3).op(0, module=2).wait_work(1).op(0, module=1)
    simulation = Simulation(trace=step.trace, target=Target.of("h100-sxm-80gb", 2))
    document = time_document(simulation)
    assert sum(link["ms"] for link in document["critical_path"]) == pytest.approx(simulation.step_ms)
    assert [module["name"] for module in document["modules"]] == ["", "a", "a.b", "c"]
    shown = text(time_tables(simulation))
    for what in (*simulation.pricing.source, "a.b", "the host"):
        assert what in shown, what


def test_prices_and_the_step_are_told_apart(job) -> None:
    """The rows of prices add up to what is priced alone, the model's row to what the summary says of the step."""
    step = job().op(0).collective(0, work=1, module=3).op(0, module=2).wait_work(1).op(0, module=1)
    simulation = Simulation(trace=step.trace, target=Target.of("h100-sxm-80gb", 2))
    document, breakdown = time_document(simulation), simulation.breakdown
    alone = document["shared"]["alone_compute_ms"] + document["shared"]["alone_communication_ms"]
    assert sum(row["ms"] for row in document["priced_by"]) == pytest.approx(alone)
    root = document["modules"][0]
    for name in ("compute_ms", "communication_ms"):
        assert (
            root[name]
            == pytest.approx(getattr(breakdown, name))
            == pytest.approx(document["shared"][f"together_{name}"])
        )
    interference_ms = breakdown.compute_ms - document["shared"]["alone_compute_ms"]
    assert interference_ms == pytest.approx(breakdown.interference_ms)


def test_interference_on_and_off_differ_in_the_report(job) -> None:
    """A product beside a gather of 256 MiB: the summary says by how much it is slowed, and 0.0 ms without interference."""
    big = TensorMeta((8192, 8192), (8192, 1), "bfloat16")
    trace = job().collective(0, work=1).op(0).wait_work(1).trace
    trace = replace(
        trace,
        signatures=(Signature("aten.mm.default", (big, big), (big,)),),
        events=(trace.events[0]._replace(nbytes=2**28), *trace.events[1:]),
    )
    target = Target.of("h100-sxm-80gb", 2)
    on = Simulation(trace=trace, target=target)
    off = on.on(replace(target, overlap=NoInterference()))
    assert off.breakdown.interference_ms == 0
    assert on.breakdown.interference_ms > 0.05
    assert on.step_ms > off.step_ms
    assert "slows computation beside it by 0.0 ms" in text(simulation_summary(off, "off"))
    assert "slows computation beside it by 0.0 ms" not in text(simulation_summary(on, "on"))


def test_recomputation_in_compiled_steps_is_said_to_be_a_part_of_them(job) -> None:
    """Where the step is checkpointed, by the job itself or in its place; else there is none."""
    trace = job().op(1).trace

    def recomputation(checkpointing: str, own: str) -> str:
        info = replace(trace.info, compiled=True, checkpointing=checkpointing, own_checkpointing=own)
        step = Simulation(trace=replace(trace, info=info), target=Target.of("h100-sxm-80gb", 2))
        return next(line for line in text(simulation_summary(step, "it")).splitlines() if "recomputation" in line)

    for checkpointing, own in (("full", "none"), ("plan", "none"), ("job", "selective")):
        assert "a part of the compiled backward" in recomputation(checkpointing, own)
    for checkpointing, own in (("none", "selective"), ("job", "none")):
        assert "0.0 ms (0.0 ms hidden)" in recomputation(checkpointing, own)


def _without_storages(trace: Trace, event: Any) -> Any:
    """The event with tensors that are not on the device, as many as its signature says."""
    if not hasattr(event, "inputs") or event.signature < 0:
        return event
    signature = trace.signatures[event.signature]
    return event._replace(inputs=(-1,) * len(signature.inputs), outputs=(-1,) * len(signature.outputs))


@pytest.fixture
def saved(job, tmp_path: Path) -> str:
    """A captured step in a file: a gather of 64 MiB beside a product."""
    trace = job().collective(0, work=1).op(0).wait_work(1).trace
    gather = trace.events[0]._replace(nbytes=2**26)
    events = [_without_storages(trace, e) for e in (gather, *trace.events[1:])]
    trace = replace(trace, info=replace(trace.info, world_size=2), events=tuple(events))
    trace.save(tmp_path / "step.trace")
    return str(tmp_path / "step.trace")


def simulated(saved: str, capsys: pytest.CaptureFixture[str], *options: str) -> str:
    """What the command prints."""
    assert main(["simulate", saved, "--gpu", "h100-sxm-80gb", "--quiet", *options]) == 0
    return capsys.readouterr().out


def test_the_command_shows_what_time_consists_of(saved: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Tables with --time, the same for machines with --json, neither without."""
    title = "Device time by cost model"
    assert title in simulated(saved, capsys, "--time")
    assert title not in simulated(saved, capsys)
    document = json.loads(simulated(saved, capsys, "--time", "--json"))
    assert {row["model"] for row in document["time"]["priced_by"]} == set(document["priced_ms_by_model"])
    assert sum(row["ms"] for row in document["time"]["critical_path"]) == pytest.approx(document["step"]["step_ms"])
    assert "time" not in json.loads(simulated(saved, capsys, "--json"))


@pytest.mark.parametrize("width", [60, 80, 120])
def test_what_is_piped_keeps_within_columns(
    saved: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, width: int
) -> None:
    """Summary, time and memory: no line is longer than COLUMNS says, and figures are whole at every width."""
    monkeypatch.setenv("COLUMNS", str(width))
    lines = simulated(saved, capsys, "--time", "--memory").splitlines()
    assert max(map(len, lines)) <= width
    text = "\n".join(lines)
    assert "log-sigmoid" in text and "32.0 MiB" in text and "step.trace" in text and "…" not in text


@pytest.mark.parametrize(
    ("name", "source"), [("fitted", "log-sigmoid"), ("alpha-beta", "alpha-beta"), ("chunks", "chunks")]
)
def test_models_of_collectives_can_be_chosen(
    saved: str, capsys: pytest.CaptureFixture[str], name: str, source: str
) -> None:
    """The model that is asked for prices the gather."""
    document = json.loads(simulated(saved, capsys, "--json", "--collectives", name))
    assert source in document["priced_ms_by_model"]


def test_interference_is_switched_off_by_the_command(saved: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The same step is as long or longer with interference, and says so."""
    on, off = (json.loads(simulated(saved, capsys, "--json", "--interference", how))["step"] for how in ("on", "off"))
    assert off["interference_ms"] == pytest.approx(0, abs=1e-9)
    assert on["interference_ms"] > 1e-5
    assert off["step_ms"] <= on["step_ms"]


def test_observed_collectives_correct_a_prediction(job) -> None:
    """Eq. 14 from end to end: after a gather was seen to take 5 ms, the step with it is predicted with 5 ms of transfer."""
    trace = job().collective(0, work=1).wait_work(1).op(0).trace
    simulation = Simulation(trace=trace, target=Target.of("h100-sxm-80gb", 2))
    corrected = Corrected(LogSigmoid(simulation.target.hardware), learning_rate=1.0)
    corrected.observe("all_gather", trace.events[0].nbytes, simulation.target.cluster.place((0, 1)), 5.0)
    seen = simulation.on(replace(simulation.target, collectives=corrected))
    assert simulation.breakdown.communication_ms < 0.1
    assert seen.breakdown.communication_ms == pytest.approx(5.0)
