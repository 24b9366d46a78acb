"""What calibration measures, pinned: the operators of its sweep and probes, calls and shapes of stored operators.

Nothing is measured here: operators run on PyTorch's meta device, which keeps no numbers. ``AUTOSAC_UPDATE_GOLDEN=1`` with this
file writes the expectations anew; look at what changed before committing.
"""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pinned import check, digest
from torch.utils._python_dispatch import TorchDispatchMode

from autosac.errors import UsageError
from autosac.estimator.calibration import Campaign
from autosac.estimator.calibration.calls import NotReplayable, build_call, tensor_bytes_needed
from autosac.estimator.calibration.campaign import by_value, fit
from autosac.estimator.calibration.host import checkpoint_probes, measure_probes, probes
from autosac.estimator.calibration.machine import Machine
from autosac.estimator.calibration.profile import profile_base, write_profile
from autosac.estimator.calibration.shapes import shape_of
from autosac.estimator.calibration.sweep import Scale, sweep_step
from autosac.estimator.hardware import load_hardware
from autosac.trace import Signature, Trace

FOLDER = Path(__file__).with_name("pinned")
META = torch.device("meta")
one_torch = pytest.mark.skipif(not torch.__version__.startswith("2.13"), reason="torch 2.13 dispatches these operators")


class Dispatched(TorchDispatchMode):
    """The operators that run, with the shapes of their tensors and their other arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[str, Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Note the call, then do it."""
        self.calls.append((str(func), told([*args, *(kwargs or {}).items()])))
        return func(*args, **(kwargs or {}))

    def summary(self) -> str:
        """A line for each operator: how often, and a hash of all its calls in order."""
        counts = Counter(name for name, _ in self.calls)
        lines = [
            f"{name} {n} {digest([of for other, of in self.calls if other == name])}" for name, n in counts.items()
        ]
        return "\n".join([f"{len(self.calls)} {digest([name for name, _ in self.calls])}", *sorted(lines)])


def told(value: Any) -> Any:
    """A value as JSON's types; of a tensor its shape, strides and type."""
    if isinstance(value, torch.Tensor):
        return [list(value.shape), list(value.stride()), str(value.dtype)]
    if isinstance(value, list | tuple):
        return [told(of) for of in value]
    return value if value is None or isinstance(value, int | float | str | bool) else str(value)


@one_torch
@pytest.mark.parametrize(
    ("name", "scale"),
    [
        ("small", Scale(elements=2**12, flops=1e6, dtypes=(torch.float32, torch.bfloat16))),
        ("gpu", Scale.of("cuda", 80 * 2**30)),
        ("cpu", Scale.of("cpu", 2**34, (torch.bfloat16,))),
    ],
)
def test_the_sweep(name: str, scale: Scale, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two rounds of all kinds of layers, one when the time is up; the first call is a warm-up without operators."""
    monkeypatch.setattr(sys.modules["torch.optim.optimizer"], "_get_fused_kernels_supported_devices", lambda: ["meta"])
    for until, rounds in ((time.monotonic() + 600, 2), (0.0, 1)):
        step = sweep_step(scale, 2, until)(META)
        with Dispatched() as warm:
            step()
        with Dispatched() as mode:
            step()
        assert not warm.calls
        check(FOLDER / f"sweep-{name}-{rounds}.txt", mode.summary())


def test_how_large_a_sweep_is() -> None:
    """A GPU takes 1/64 of its memory's bytes as elements, but no more than 2^28; a CPU 50 ms for a product."""
    small, large = Scale.of("cuda", 2**30), Scale.of("cuda", 2**40)
    assert (small.elements, large.elements, large.flops) == (2**24, 2**28, 2e13)
    assert large.dtypes == (torch.bfloat16, torch.bfloat16, torch.float32)
    cpu = Scale.of("cpu", 2**40)
    assert (cpu.elements, cpu.flops, cpu.dtypes) == (2**22, 4e9, (torch.float32,))
    assert Scale.of("cpu", 1, (torch.float64,)).dtypes == (torch.float64,)


@one_torch
@pytest.mark.parametrize("name", [*probes(), *checkpoint_probes()])
def test_probes(name: str) -> None:
    """A tiny step on the CPU twice: all its operators with their arguments, and which modules are selective."""
    make, selective = checkpoint_probes()[name] if name in checkpoint_probes() else (probes()[name], ())
    model, step = make(torch.device("cpu"))
    with Dispatched() as mode:
        step()
        step()
    modules = f"{sum(1 for _ in model.modules())} modules, selective: {' '.join(selective)}"
    check(FOLDER / f"probe-{name.replace(' ', '-').replace(',', '')}.txt", f"{modules}\n{mode.summary()}")


def test_probes_take_turns() -> None:
    """Every step runs twice in each of equally many rounds, one after the other, the second time by the clock."""
    calls: list[str] = []

    def make(name: str) -> Callable[[torch.device], Any]:
        return lambda device: (None, lambda: calls.append(f"{name} {device}"))

    found = measure_probes([make("a"), make("b")], torch.device("cpu"))
    assert calls == ["a cpu", "a cpu", "b cpu", "b cpu"] * (len(calls) // 4)
    assert len(calls) // 4 == 19 and all(ms >= 0 for ms in found)


@one_torch
def test_stored_operators_are_called_again(operators: Sequence[Signature]) -> None:
    """Each of 300 operators of real steps: the call with its tensors and numbers, or why there is none; what it takes."""
    lines = []
    for signature in operators:
        with Dispatched() as mode:
            try:
                call = build_call(signature, META)
                found = digest([told(call.args), told(list(call.kwargs.items())), mode.calls])
            except NotReplayable as e:
                found = str(e)
            except (RuntimeError, NotImplementedError) as e:
                found = type(e).__name__
        lines.append(f"{signature.name} {found}")
    check(FOLDER / "calls.txt", "\n".join(lines))


def test_what_operators_need_and_are_like(operators: Sequence[Signature]) -> None:
    """Bytes of each stored operator, and what its cost is a function of."""
    lines = []
    for signature in operators:
        shape = shape_of(signature)
        found = "none" if shape is None else f"{' '.join(shape.groups)} {digest(list(shape))}"
        lines.append(f"{signature.name} {tensor_bytes_needed(signature)} {found}")
    check(FOLDER / "shapes.txt", "\n".join(lines))


def test_operators_by_value() -> None:
    """The operators of a stored step, those first that take most of it; an empty trace has none."""
    trace = Trace.load(FOLDER.parents[2] / "golden" / "observed.trace")
    found = by_value(trace, "h100-sxm-80gb")
    check(FOLDER / "by_value.txt", "\n".join(f"{s.name} {[m.shape for m in s.inputs]}" for s in found))


# ---- fitting and writing --------------------------------------------------------------------------------------------


@pytest.fixture
def machine() -> Machine:
    """The CPU with one thread."""
    return Machine("cpu", 1)


def campaign(machine: Machine, output: Path, **more: Any) -> Campaign:
    """Of nothing, into a file."""
    return Campaign(machine=machine, signatures=(), probes={}, output=output, deadline=0.0, **more)


def test_rates_of_what_was_measured(
    machine: Machine, tmp_path: Path, op: Callable[..., Signature], meta: Callable[..., Any]
) -> None:
    """The best product's rate, the bandwidth that nine of ten large operators without products stay under, the shortest time;
    families of fewer than six operators have no model of their own.
    """
    square = meta((1024, 1024))
    measured = {
        op("mm.default", [square, square], [square]): (2.0, 0.01),
        op("t.default", [square], [square]): (4.0, 0.0),
    }
    for i in range(11):
        rows = meta((1024 + i, 1024))
        measured[op("relu.default", [rows], [rows])] = (1.0 + 0.1 * i, 0.0)
    small = meta((16,))
    measured[op("relu.default", [small], [small])] = (0.001, 0.0)
    found = fit(measured, campaign(machine, tmp_path / "cpu.toml"), None)
    assert found.overhead_ms == 0.001 and found.device == "cpu" and found.memory is None
    assert found.peak_flops == {"float32": pytest.approx(2 * 1024**3 / 2e-3)}
    rates = sorted([2 * 4 * 2**20 / 4e-3, *(2 * 4 * 1024 * (1024 + i) / (1.0 + 0.1 * i) * 1e3 for i in range(11))])
    assert found.bandwidth == pytest.approx(rates[int(0.9 * 11)])
    assert found.about["operators"] == 14
    assert set(found.groups) == {"matmul:float32", "relu:float32", "t:float32", "family elementwise:float32"}


def test_the_profile_of_a_cpu(
    machine: Machine, tmp_path: Path, op: Callable[..., Signature], meta: Callable[..., Any]
) -> None:
    """What was measured, in a file that loads; the host's costs in a table of their own."""
    square = meta((1024, 1024))
    found = fit(
        {op("mm.default", [square, square], [square]): (2.0, 0.01)}, campaign(machine, tmp_path / "cpu.toml"), None
    )
    host = {"eager_op_us": 5.0}
    found.save(tmp_path / "cpu.calibrated.json")
    (tmp_path / "cpu.measured.json").write_text('{"version": 1, "operators": []}')
    write_profile(tmp_path / "cpu.toml", machine, found, host, "cpu.measured.json", "cpu.calibrated.json")
    text = (tmp_path / "cpu.toml").read_text()
    rate = 2 * 1024**3 / 2e-3 / 1e12
    for line in (
        "[peak_tflops]",
        f"float32 = {float(f'{rate:.6g}')}",
        "[host]",
        "eager_op_us = 5.0",
        "kernel_us = 2000.0",
    ):
        assert line in text.splitlines()
    assert text.startswith("# Written by autosac calibrate: ")
    write_profile(tmp_path / "bare.toml", machine, found, {}, "cpu.measured.json", "cpu.calibrated.json")
    assert "[host]" not in (tmp_path / "bare.toml").read_text()


def test_what_a_profile_is_based_on(tmp_path: Path) -> None:
    """A shipped GPU by its name; a file by its place, which must be beside the new one and not that one itself."""
    hardware = load_hardware("h100-sxm-80gb")
    assert profile_base(hardware, tmp_path / "new.toml", "h100-sxm-80gb") == "h100-sxm-80gb"
    assert profile_base(hardware, tmp_path / "new.toml", str(tmp_path / "old.toml")) == "old.toml"
    assert profile_base(hardware, tmp_path / "new.toml", str(tmp_path / "a" / "old.toml")) == "a/old.toml"
    for place in (tmp_path.parent / "old.toml", tmp_path / "new.toml"):
        with pytest.raises(UsageError, match="must be in the same folder"):
            profile_base(hardware, tmp_path / "new.toml", str(place))
    assert np.isfinite(hardware.mem_bandwidth_gbps)
