"""`autosac calibrate` from end to end, its journal, and what it refuses."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import autosac
from autosac.capture.jobs.eager import EagerRequest, capture_eager
from autosac.cli.parser import main
from autosac.errors import HardwareError, UsageError
from autosac.estimator import load_hardware
from autosac.estimator.calibration import Campaign, calibrate
from autosac.estimator.calibration.host import FIELDS
from autosac.estimator.calibration.journal import Journal
from autosac.estimator.calibration.machine import Machine
from autosac.estimator.profiled import ProfiledModel
from autosac.trace import Signature
from traces import trace_of


def make_step(device: torch.device) -> Any:
    """A tiny model."""
    with device:
        model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.ReLU(), torch.nn.Linear(32, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.ones(8, 16, device=device)

    def step() -> None:
        model(x).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    return model, step


@pytest.fixture(scope="module")
def capture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model's step on the CPU, saved."""
    path = tmp_path_factory.mktemp("capture") / "step.trace"
    capture_eager(make_step, EagerRequest(target="cpu")).save(path)
    return path


@pytest.fixture(scope="module")
def profile(capture: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The profile of this machine's CPU for that step, by the command."""
    output = tmp_path_factory.mktemp("profile") / "cpu.toml"
    command = [
        "calibrate",
        str(capture),
        "--device",
        "cpu",
        "--threads",
        "1",
        "-o",
        str(output),
        "--minutes",
        "5",
        "--quiet",
    ]
    assert main(command) == 0
    return output


def test_the_command_leaves_a_profile_that_loads(profile: Path) -> None:
    """Profile, models and measured operators are there, nothing else; the profile is a CPU's with its host's costs."""
    assert sorted(p.name for p in profile.parent.iterdir()) == ["cpu.calibrated.json", "cpu.measured.json", "cpu.toml"]
    hardware = load_hardware(str(profile))
    assert (hardware.device, hardware.vendor, hardware.sm_count) == ("cpu", "CPU", 1)
    host = dict(hardware.host)
    assert set(host) == set(FIELDS)
    assert host["checkpoint_us"] > 0 and host["selective_op_us"] > 0


def test_the_profile_prices_the_step(profile: Path, capsys: pytest.CaptureFixture[str], capture: Path) -> None:
    """Simulate accepts it by path; every operator of the captured step comes from the measurements."""
    assert main(["simulate", str(capture), "--gpu", str(profile), "--json", "--quiet"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert list(document["priced_ms_by_model"]) == ["profiled"]
    assert document["step"]["step_ms"] > 0


def test_the_step_is_the_sum_of_what_host_and_operators_take(profile: Path) -> None:
    """A CPU executes serially: the step is never shorter than its operators."""
    simulation = autosac.simulate(make_step, gpu=str(profile), target="cpu")
    assert simulation.step_ms >= float(simulation.pricing.event_ms.sum())


def test_unmeasured_operators_fall_back(profile: Path, op: Callable[..., Any], meta: Callable[..., Any]) -> None:
    """An operator of a measured group is fitted, one of no group falls through to the roofline."""
    from autosac.estimator.models import first_estimates
    from autosac.estimator.pricing import default_models

    mm = op("mm.default", [meta((24, 40)), meta((40, 8))], [meta((24, 8))])
    sort = op("sort.default", [meta((64,))], [meta((64,)), meta((64,), "int64")])
    first, second = first_estimates(default_models(load_hardware(str(profile))).operators, [mm, sort])
    assert first.source == "calibrated:matmul" and second.source == "roofline"


def _campaign(path: Path, signatures: list[Signature], seconds: float, *, resume: bool = False) -> Campaign:
    return Campaign(
        machine=Machine("cpu", torch.get_num_threads()),
        signatures=signatures,
        probes={},
        output=path / "p.toml",
        deadline=time.monotonic() + seconds,
        resume=resume,
    )


def test_what_cannot_be_measured_is_listed(tmp_path: Path, op: Callable[..., Any], meta: Callable[..., Any]) -> None:
    """A tensor of 4 TiB, unknown operators and a wrong call are skipped with their reasons; the rest is measured."""
    huge = op("relu.default", [meta((2**40,))], [meta((2**40,))])
    unknown = op("no_such.default", [meta((4,))], [meta((4,))])
    wrong = op("mm.default", [meta((2, 3)), meta((2, 3))], [meta((2, 3))])
    many = op("no_such.other", [meta((n,)) for n in (1, 2, 3, 4)], [meta((4,))])
    good = op("relu.default", [meta((64,))], [meta((64,))])
    result = calibrate(_campaign(tmp_path, [huge, unknown, wrong, many, good], 60))
    assert result.measured == 1 and result.left == 0
    reasons = sorted(result.skipped.values())
    assert len(reasons) == 4 and "aten.no_such.other 1 2 3" in result.skipped
    assert reasons[0].startswith("RuntimeError") and reasons[1].startswith("it needs 8192.0 GiB")
    assert "has no operator" in reasons[2] and "has no operator" in reasons[3]
    assert float(torch.tensor(1e-40) * 2) > 0  # the smallest numbers are no zeros again


def test_a_second_start_measures_the_rest(tmp_path: Path, op: Callable[..., Any], meta: Callable[..., Any]) -> None:
    """The journal of a calibration that ran out of time is kept, needs --resume, and is gone when all is done. What it has
    counts as one of three measurements where time is left for more.
    """
    signatures = [op("relu.default", [meta((n,))], [meta((n,))]) for n in (16, 32)]
    machine = Machine("cpu", torch.get_num_threads())
    journal_path = tmp_path / "p.journal.jsonl"
    from autosac.estimator.profiled import signature_key

    with Journal(journal_path, machine.identity, resume=False) as journal:
        journal.finish(signature_key(signatures[0]), 123.0, 0.0)
    with pytest.raises(UsageError, match="--resume"):
        calibrate(_campaign(tmp_path, signatures, 60))
    result = calibrate(_campaign(tmp_path, signatures, -1, resume=True))
    assert (result.measured, result.left) == (1, 1) and journal_path.exists()
    result = calibrate(_campaign(tmp_path, signatures, 60, resume=True))
    assert (result.measured, result.left) == (2, 0) and not journal_path.exists()
    (known,) = ProfiledModel.load(tmp_path / "p.measured.json").estimate(signatures[:1])
    assert known is not None and known.ms == pytest.approx(123.0 / 3, abs=1)


def _complaint(capsys: pytest.CaptureFixture[str], arguments: list[str]) -> str:
    assert main(arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.count("\n") == 1
    return captured.err


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["-o", "{tmp}/p.toml", "--minutes", "0"], "--minutes must be above 0"),
        (["-o", "{tmp}/p.toml", "--minutes", "nan"], "--minutes must be above 0"),
        (["-o", "{tmp}/p.toml", "--threads", "0"], "argument --threads: '0' is not a whole number from 1 to"),
        (["-o", "{tmp}/no/p.toml"], "there is no folder"),
        (["-o", "{tmp}/p.json"], "ends in .toml"),
        (["job.toml", "--sweep", "-o", "{tmp}/p.toml"], "not both"),
        (["-o", "{tmp}/p.toml", "--", "--training.seq_len", "4"], "need a job"),
    ],
)
def test_wrong_arguments(tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], text: str) -> None:
    """Each ends with one line, exit code 2 and no file."""
    filled = [argument.replace("{tmp}", str(tmp_path)) for argument in arguments]
    assert text in _complaint(capsys, ["calibrate", "--device", "cpu", *filled])
    assert list(tmp_path.iterdir()) == []


def test_an_empty_trace(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A capture without operators cannot be calibrated; one line, no file beside it."""
    trace_of().save(tmp_path / "empty.trace")
    command = ["calibrate", str(tmp_path / "empty.trace"), "--device", "cpu", "-o", str(tmp_path / "p.toml"), "--quiet"]
    assert "the trace is empty" in _complaint(capsys, command)
    assert [p.name for p in tmp_path.iterdir()] == ["empty.trace"]


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ('measured = "gone.json"', "cannot be read"),
        ('calibrated = "gone.json"', "cannot be read"),
        ('device = "tpu"', "device must be cuda or cpu"),
        ("[host]\neager_op_us = nan", "host.eager_op_us must be 0 or a number from 0.0001 to 1e+07, not nan"),
        ("[host]\nbogus_us = 1.0", "host.bogus_us is not a known"),
    ],
)
def test_damaged_profiles(
    tmp_path: Path, capture: Path, capsys: pytest.CaptureFixture[str], change: str, text: str
) -> None:
    """A profile whose files are missing or whose values are wrong ends a simulation with one line."""
    path = tmp_path / "p.toml"
    path.write_text(f'base = "h100-sxm-80gb"\n{change}\n')
    assert text in _complaint(capsys, ["simulate", str(capture), "--gpu", str(path), "--quiet"])


def test_a_cluster_without_bandwidth(tmp_path: Path, capture: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Zero bandwidth between nodes is refused by the file's name and the key."""
    path = tmp_path / "c.toml"
    path.write_text('base = "hgx-h100"\ninter_gbps = 0.0\n')
    command = ["simulate", str(capture), "--gpu", "h100-sxm-80gb", "--cluster", str(path), "--quiet"]
    assert "inter_gbps must be a number from 0.0001 to 1e+07, not 0.0" in _complaint(capsys, command)


def test_devices_that_do_not_exist() -> None:
    """A machine has a CPU or a CUDA device, and at least one thread."""
    with pytest.raises(UsageError, match="cuda or cpu"):
        Machine("tpu", 1)
    with pytest.raises(UsageError, match="at least 1"):
        Machine("cpu", 0)
    with pytest.raises(HardwareError):
        load_hardware("no-such-profile.toml")
