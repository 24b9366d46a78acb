"""A plain PyTorch script with ``cuda``: its figures, its own output, and how it may fail."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

import autosac
from autosac.capture.jobs.eager import EagerRequest, capture_eager
from autosac.scripts.launch import run_script
from autosac.scripts.request import ScriptRequest
from autosac.scripts.target import script_target
from autosac.trace import Region, Trace

MODEL = """
import sys, time
import torch
from torch import nn

class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))

def training(device):
    model = nn.Sequential(*(Block(512) for _ in range(4)), nn.Linear(512, 1000)).to(device)
    optimizer = torch.optim.AdamW(model.parameters())

    def step():
        x, y = torch.randn(4096, 512).to(device), torch.randint(1000, (4096,)).to(device)
        with torch.autocast(device_type=torch.device(device).type, dtype=torch.bfloat16):
            loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    return model, step
"""
SCRIPT = (
    MODEL
    + """
assert torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
names = torch.cuda.get_device_name(), torch.cuda.get_device_properties(0).name
assert names == ("NVIDIA H100 80GB HBM3", "NVIDIA H100 80GB HBM3"), names
assert __name__ == "__main__" and sys.argv[1:] == ["--lr", "1"]
_, step = training("cuda")
begin = time.time()
for number in range(10_000):
    loss = step()
    now = time.time()
    print(f"step {number}: {1e3 * (now - begin):.3f} ms, peak {torch.cuda.max_memory_reserved()}", flush=True)
    begin = now
"""
)


def make_step(device: torch.device) -> Any:
    """The same training, as `autosac.simulate` wants it."""
    namespace: dict[str, Any] = {}
    exec(MODEL, namespace)
    return namespace["training"](device)


def test_figures_are_those_of_simulate(run: Any, tmp_path: Path) -> None:
    """Step time and memory are exactly those of the same step under `autosac.simulate`, and so is what the script prints."""
    ended = run(SCRIPT, "--save-capture", "step.trace", arguments=("--lr", "1"))
    assert ended.returncode == 0, ended.stderr
    expected = autosac.simulate(make_step)
    trace = Trace.load(tmp_path / "step.trace")
    found = autosac.simulation.simulation_of(trace, expected.target)
    assert found.step_ms == pytest.approx(expected.step_ms, rel=1e-12)  # prices are summed in another order
    assert found.peak_active_bytes == expected.peak_active_bytes
    assert found.peak_reserved_bytes == expected.peak_reserved_bytes
    printed = re.findall(r"step (\d+): ([\d.]+) ms, peak (\d+)", ended.stdout)
    assert [int(number) for number, _, _ in printed] == [0, 1, 2]
    assert abs(float(printed[2][1]) - expected.step_ms) < 0.01
    assert int(printed[2][2]) == expected.peak_reserved_bytes
    assert "step 2 of the 3 that the script ran" in ended.stdout


def test_planning_sees_what_it_sees_of_a_step(tmp_path: Path, warm: None) -> None:
    """The observed regions of the kept step, and of no other, are those of the same step under `autosac.plan`."""
    (tmp_path / "train.py").write_text(SCRIPT)
    request = ScriptRequest(
        script=str(tmp_path / "train.py"), arguments=("--lr", "1"), quiet=True, unlimited=True, observe=True
    )
    expected = capture_eager(make_step, EagerRequest(gpu=script_target(request).gpu, observe=True))
    found = run_script(request).trace
    assert len(expected.regions) == 4
    assert list(map(shape_of, found.regions)) == list(map(shape_of, expected.regions))


TALKING = """
import sys
import torch
from torch import nn
print("begun", file=sys.stderr)
model = nn.Sequential(*(nn.Sequential(nn.Linear(512, 2048), nn.GELU(), nn.Linear(2048, 512)) for _ in range(4))).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(9):
    model(torch.randn(4096, 512, device="cuda")).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def test_planning_runs_a_script_in_silence(run_alone: Any) -> None:
    """What the script says on standard error is shown once, though planning runs it again and again."""
    ended = run_alone(TALKING, "--plan", "320MiB", "--quiet")
    assert ended.returncode == 0 and "Checkpointed modules" in ended.stdout, ended.stderr
    assert ended.stderr.count("begun") == 1


@pytest.mark.parametrize("how", ["torch.compile(layer)", "layer.compile() or layer"])
def test_planning_knows_that_a_script_compiles(how: str, tmp_path: Path, warm: None) -> None:
    """Though the observed step is not compiled: policies are then measured in steps that are."""
    (tmp_path / "train.py").write_text(
        f"""
import torch
layer = torch.nn.Linear(64, 64).cuda()
called = {how}
optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
for step in range(3):
    called(torch.randn(8, 64, device="cuda")).sum().backward()
    optimizer.step()
"""
    )
    script = ScriptRequest(script=str(tmp_path / "train.py"), quiet=True, unlimited=True, observe=True)
    trace = run_script(script).trace
    assert trace.info.compiled
    assert "aten.addmm.default" in {signature.name for signature in trace.signatures}


def shape_of(region: Region) -> tuple[Any, ...]:
    """Where it is and what it calls."""
    return region.module, region.first, region.last, [call.op for call in region.calls]


MODULE = """
import sys
import torch
from .networks import network

def main():
    model = network().cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(int(sys.argv[1])):
        model(torch.ones(4, 8, device="cuda")).sum().backward()
        optimizer.step()
    print(__name__, __package__, sys.argv[1:], "of", sys.argv[0].rsplit("/", 1)[-1])

if __name__ == "__main__":
    main()
"""


def test_a_module_of_a_package_runs_as_with_python_m(
    autosac: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its imports may be relative, the folder is the present one, and its arguments are its own."""
    monkeypatch.chdir(tmp_path)
    package = tmp_path / "training"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "networks.py").write_text("from torch import nn\ndef network(): return nn.Linear(8, 8)\n")
    (package / "train.py").write_text(MODULE)
    ended = autosac("run", "-m", "training.train", "--gpu", "h100-sxm-80gb", "--", "3", "--gpu", "none")
    assert ended.returncode == 0, ended.stderr
    assert "__main__ training ['3', '--gpu', 'none'] of train.py" in ended.stdout
    assert "step 2 of the 3 that the script ran" in ended.stdout
