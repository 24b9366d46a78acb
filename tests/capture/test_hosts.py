"""Machines that AutoSAC runs on: with and without Triton, and with a GPU that has to stay untouched."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from autosac.capture.jobs.session import CaptureSession
from autosac.capture.process.server import CaptureServer
from autosac.capture.request import TitanRequest
from autosac.target import TargetGPU
from autosac.titan.version import has_python_jobs
from autosac.trace import Op, Trace

pytestmark = pytest.mark.skipif(has_python_jobs(), reason="the job is a file of TorchTitan 0.2")

JOB = """
[model]
name = "deepseek_v3"
flavor = "debugmodel"
[training]
local_batch_size = 2
seq_len = 128
[parallelism]
expert_parallel_degree = 2
[activation_checkpoint]
mode = "none"
"""
# Read by Python when it starts, before anything is imported.
HIDE_TRITON = """
import importlib.machinery as machinery
find = machinery.PathFinder.find_spec
machinery.PathFinder.find_spec = classmethod(
    lambda cls, name, path=None, target=None: None if name.partition(".")[0] == "triton" else find(name, path, target)
)
"""
# A job's own module, imported while its Trainer is built. Every way of PyTorch to a GPU goes through these.
PROBE = """
import os, pathlib, torch
def touched(*_): raise SystemExit("the GPU is touched")
for name in ("_cuda_init", "_cuda_setDevice", "_cuda_getDeviceCount"):
    setattr(torch._C, name, touched)
found = [os.environ["CUDA_VISIBLE_DEVICES"], torch.cuda.is_available(), torch.cuda.is_initialized()]
pathlib.Path(os.environ["PROBE_REPORT"]).write_text(repr(found))
"""


def request(tmp_path: Path, *overrides: str) -> TitanRequest:
    """The job's step, with a dense layer and one of experts."""
    path = tmp_path / "job.toml"
    path.write_text(JOB)
    return TitanRequest(config_file=str(path), overrides=overrides, world_size=2, layers=2)


class Elsewhere(NamedTuple):
    """A capture on a machine that has a GPU and no Triton: what it found, and what the job's own module said of the GPU."""

    trace: Trace
    report: str


@pytest.fixture(scope="module")
def elsewhere(tmp_path_factory: pytest.TempPathFactory) -> Elsewhere:
    """The job's step, really captured, by a process of its own. One is enough to hide Triton in it and to watch the GPU."""
    folder = tmp_path_factory.mktemp("elsewhere")
    (folder / "sitecustomize.py").write_text(HIDE_TRITON)
    (folder / "probe.py").write_text(PROBE)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join((str(folder), *filter(None, (os.environ.get("PYTHONPATH"),)))))
        patch.setenv("PROBE_REPORT", str(folder / "report"))
        patch.setenv("CUDA_VISIBLE_DEVICES", "0")
        hidden = subprocess.run([sys.executable, "-c", "import triton"], capture_output=True, text=True)
        assert "ModuleNotFoundError: No module named 'triton'" in hidden.stderr
        with CaptureServer(debug=True) as server:
            trace = server.capture(request(folder, "--experimental.custom_import", "probe"))
    return Elsewhere(trace, (folder / "report").read_text())


def test_captures_are_the_same_without_triton(
    tmp_path: Path, elsewhere: Elsewhere, capture_server: CaptureServer
) -> None:
    """TorchTitan's kernels are imported where there is no Triton, their launches recorded; every event is the same."""
    here = capture_server.capture(request(tmp_path))
    without = elsewhere.trace
    assert without.events == here.events and without.signatures == here.signatures
    names = [without.signatures[event.signature].name for event in without.events if isinstance(event, Op)]
    assert "triton._fill_indices_kernel" in names


def test_what_a_kernel_writes_to_is_read_from_its_source(tmp_path: Path, capture_server: CaptureServer) -> None:
    """The kernel that fills the indices of experts' tokens writes to them, not to the counts and offsets that it reads."""
    observed = capture_server.capture(replace(request(tmp_path), observe=True))
    regions = [r for r in observed.regions if observed.modules[r.module].endswith(".moe")]
    assert regions
    for region in regions:
        fills = [call for call in region.calls if call.op == "triton._fill_indices_kernel"]
        made = {storage for call in region.calls if call.op == "aten.full.default" for storage in call.created}
        assert len(fills) == 1 and len(fills[0].reads) == 4
        assert len(fills[0].writes) == 1 and set(fills[0].writes) <= made


def test_kernels_without_triton_say_so_when_they_are_launched() -> None:
    """A decorated function can be defined and looked at; launching it is the error."""
    from autosac.capture.patches.without_triton import jit

    @jit(do_not_specialize=["n"])
    def kernel(n: int) -> None:
        """Never run."""

    launch = kernel[(1,)]
    with pytest.raises(RuntimeError, match="the kernel kernel needs Triton, which is not installed"):
        launch(1)


def test_a_capture_creates_no_cuda_context(elsewhere: Elsewhere) -> None:
    """The job sees no GPU, whatever the machine has, and nothing on the way through a whole step asks for one."""
    assert elsewhere.trace.events
    assert elsewhere.report == "['', False, False]"


def ask_for_a_gpu(folder: Path) -> None:
    """In a process that is forked: one that captures, where PyTorch had found GPUs; then as a job that uses CUDA directly."""
    torch.cuda.is_available, torch.cuda.device_count = lambda: True, lambda: 8  # type: ignore[assignment]
    CaptureSession(TargetGPU(), "cpu")
    found = [torch.cuda.is_available(), torch.cuda.device_count()]
    try:
        torch.cuda.get_device_capability()
    except Exception as e:
        (folder / "said").write_text(f"{found} {e}")
    os._exit(0)


def test_a_process_that_captures_has_no_cuda(tmp_path: Path) -> None:
    """Where PyTorch had found a GPU it finds none, and a job that asks for it all the same is told."""
    child = get_context("fork").Process(target=ask_for_a_gpu, args=(tmp_path,))
    child.start()
    child.join()
    assert re.match(r"\[False, 0\] .*the job uses CUDA directly", (tmp_path / "said").read_text())


def test_the_command_line_does_not_import_torch() -> None:
    """Only the capture process does, where CUDA is hidden."""
    program = "import sys, autosac.cli.parser, autosac.cli.commands; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
    assert importlib.util.find_spec("torch") is not None
