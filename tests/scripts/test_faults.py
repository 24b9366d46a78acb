"""Scripts that fail, that catch what they can, or that leave something behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

OUT_OF_MEMORY = """
import torch
rows = 2**20
while True:
    try:
        torch.empty(rows, 2**10, device="cuda")
        rows *= 2
    except torch.OutOfMemoryError as error:
        print(f"{rows} rows: {error}")
        break
print(torch.cuda.memory_allocated())
model = torch.nn.Linear(4, 4).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model(torch.randn(4, 4, device="cuda")).sum().backward()
optimizer.step()
raise ValueError("it is enough")
"""
SPARSE = """
import torch
model = torch.nn.Embedding(10, 4, sparse=True).cuda()
optimizer = torch.optim.SparseAdam(model.parameters())
model(torch.zeros(2, dtype=torch.long, device="cuda")).sum().backward()
optimizer.step()
"""
ON_THE_CPU = """
import torch
model = torch.nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(10):
    model(torch.randn(4, 4)).sum().backward()
    optimizer.step()
"""
STUBBORN = """
import torch
model = torch.nn.Linear(4, 4).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
x = torch.randn(4, 4, device="cuda")
while True:
    try:
        model(x).sum().backward()
        optimizer.step()
    except BaseException as error:
        print(f"goes on after {type(error).__name__}", flush=True)
"""
DAEMON = """
import os
if os.fork():
    os._exit(0)
os.setsid()
import torch
while True:
    torch.ones(4, device="cuda").sum().item()
"""
HOGWILD = """
import torch
import torch.multiprocessing as mp
def train(model): pass
if __name__ == "__main__":
    mp.set_start_method("spawn")
    model = torch.nn.Linear(4, 4).cuda()
    model.share_memory()
    mp.Process(target=train, args=(model,)).start()
"""
FORKS = """
import os
import torch
model = torch.nn.Linear(4, 4).cuda()
if not (child := os.fork()):
    os._exit(0)
os.waitpid(child, 0)
model(torch.ones(2, 4, device="cuda"))
"""
EXITS = """
import os, sys
import torch
model = torch.nn.Linear(4, 4).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
try:
    sys.exit(5)
except SystemExit as error:
    print("caught", error.code, flush=True)
for _ in range(2):
    model(torch.ones(2, 4, device="cuda")).sum().backward()
    optimizer.step()
os._exit(int(os.environ.get("EXIT_CODE", "0")))
"""
WITHOUT_END = """
import os, sys, time
import torch
if os.fork() == 0:
    os.setsid()
    while True:
        time.sleep(1)
print(f"reads {sys.stdin.read()!r}", flush=True)
open("there", "w").close()
torch.ones(1, device="cuda")
while True:
    time.sleep(0.001)
"""


def processes() -> set[int]:
    """All that run now."""
    return {int(path.name) for path in Path("/proc").glob("[0-9]*")}


def test_a_script_that_asks_a_question_gets_no_answer(run: Any) -> None:
    """Its own traceback, and why: nobody can answer, whoever runs it."""
    ended = run('answer = input("Which model? ")')
    assert ended.returncode == 1 and ended.stdout == "Which model? "
    *own, why, code = ended.stderr.splitlines()
    assert own[-1] == "EOFError: EOF when reading a line"
    assert why.startswith("autosac: standard input is empty under `autosac run`: ")
    assert code == "autosac: the script has ended with exit code 1"


def test_memory_runs_out_and_a_script_raises(run: Any) -> None:
    """PyTorch's own message for what does not fit; then the script's own traceback, once, and its exit code."""
    ended = run(OUT_OF_MEMORY)
    assert ended.returncode == 1
    assert ended.stdout.startswith("33554432 rows: CUDA out of memory. Tried to allocate 128.00 GiB. GPU 0 has a total")
    assert ended.stdout.splitlines()[1] == "0"
    assert ended.stderr.count("Traceback") == ended.stderr.count("ValueError: it is enough") == 1
    assert ended.stderr.splitlines()[1].endswith('train.py", line 16, in <module>')
    assert "autosac/" not in ended.stderr


def test_an_error_within_the_simulation(run: Any) -> None:
    """The traceback has frames of the script and of PyTorch, none of this project's."""
    ended = run(SPARSE)
    assert ended.returncode == 1
    assert ended.stderr.splitlines()[1].endswith('train.py", line 5, in <module>')
    assert "NotImplementedError: sparse tensors cannot be simulated" in ended.stderr
    assert "torch/autograd/graph.py" in ended.stderr
    assert "/autosac/" not in ended.stderr


def test_a_script_that_trains_on_the_cpu(run: Any) -> None:
    """It runs, and nothing is simulated: an error that says so."""
    ended = run(ON_THE_CPU)
    assert (ended.returncode, ended.stdout) == (1, "")
    assert ended.stderr.startswith("autosac: the script has put nothing on the GPU")


def test_a_script_that_gives_its_model_to_other_processes(run: Any) -> None:
    """They have no simulated GPU: one line says so, where each of them would end with a traceback."""
    ended = run(HOGWILD)
    assert (ended.returncode, ended.stdout) == (2, "")
    assert ended.stderr.startswith("autosac: the script gives simulated tensors to a process that it starts")
    assert "Traceback" not in ended.stderr


def test_a_script_whose_processes_train(run: Any) -> None:
    """No step is seen in its own process: the error says what may be the reason."""
    ended = run(FORKS)
    assert (ended.returncode, ended.stdout) == (1, "")
    assert ended.stderr.startswith("autosac: the script has ended before its first step was complete")
    assert ended.stderr.endswith("What it trains in processes of its own is not seen\n")


def test_a_script_that_catches_everything(run: Any) -> None:
    """It is stopped all the same, and its step is reported."""
    ended = run(STUBBORN)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.count("goes on after StopScript") == 3
    assert "step 2 of the 3 that the script ran" in ended.stdout


def test_a_script_that_becomes_a_daemon(run_alone: Any, tmp_path: Path) -> None:
    """Its first process does nothing on the GPU, which is said; the daemon does not outlive the command."""
    before = processes()
    ended = run_alone(DAEMON)
    assert ended.returncode == 1
    assert ended.stderr.startswith(
        "autosac: the script has put nothing on the GPU: it trains on the CPU, or in a process of"
    )
    assert not {pid for pid in processes() - before if _is_of(tmp_path, pid)}


@pytest.mark.parametrize("code", [0, 6])
def test_a_script_that_ends_its_process(run: Any, monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    """`os._exit`: its step is reported, or its exit code; `sys.exit` that the script catches itself ends nothing."""
    monkeypatch.setenv("EXIT_CODE", str(code))
    ended = run(EXITS)
    assert ended.returncode == code
    assert ended.stdout.startswith("caught 5\n")
    assert ("step 2 of the 2 that the script ran" in ended.stdout) == (code == 0)


def test_patience_ends(run_alone: Any, tmp_path: Path) -> None:
    """A script that never steps ends with a hint that names the line where it is; what it started has ended, too."""
    before = processes()
    ended = run_alone(WITHOUT_END, "--patience", "6")
    assert ended.returncode == 1
    assert "has taken no step for 6 s (at " in ended.stderr and "train.py:12)" in ended.stderr
    assert ended.stdout == "reads ''\n"
    assert not {pid for pid in processes() - before if _is_of(tmp_path, pid)}


def _is_of(folder: Path, pid: int) -> bool:
    """Whether a process runs a script of this folder: other tests may run others meanwhile."""
    process = Path(f"/proc/{pid}")
    try:
        return (
            b"AUTOSAC_SCRIPT=" in (process / "environ").read_bytes() and (process / "cwd").resolve() == folder.resolve()
        )
    except OSError:
        return False


STOPS_WHEN_PLANNED = """
import pathlib, subprocess, sys
import torch
if pathlib.Path("run").exists():
    subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
    pathlib.Path("there").touch()
    while True:
        pass
pathlib.Path("run").touch()
model = torch.nn.Linear(64, 64).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(9):
    model(torch.randn(8, 64, device="cuda")).sum().backward()
    optimizer.step()
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signals_leave_nothing(cache: Path, tmp_path: Path, number: int) -> None:
    """Ctrl-C in a terminal, and SIGTERM to the command: exit code 128 + N, and no process is left."""
    _interrupt(WITHOUT_END, (), tmp_path, cache, number)


def test_an_interrupt_while_planning_leaves_nothing(cache: Path, tmp_path: Path) -> None:
    """Planning runs the script again, in a process that is forked: it ends too, with a daemon that it has started."""
    _interrupt(STOPS_WHEN_PLANNED, ("--plan", "1GiB"), tmp_path, cache, signal.SIGINT)


def test_an_interrupt_before_the_first_line_is_one_line(cache: Path, tmp_path: Path) -> None:
    """Ctrl-C in a terminal reaches the script's process, too, which is still importing: it shows nothing."""
    (tmp_path / "train.py").write_text(WITHOUT_END)
    with subprocess.Popen(
        [sys.executable, "-m", "autosac", "run", "train.py", "--gpu", "h100-sxm-80gb", "--quiet"],
        cwd=tmp_path,
        env={**os.environ, "AUTOSAC_CACHE": str(cache)},
        stdin=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    ) as process:
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
        while not children.read_text():
            time.sleep(0.01)
        time.sleep(0.2)  # it is Python by now
        os.killpg(process.pid, signal.SIGINT)
        assert process.communicate(timeout=60)[1] == "autosac: interrupted\n"
    assert process.returncode == 130 and not (tmp_path / "there").exists()


def _interrupt(source: str, options: tuple[str, ...], folder: Path, cache: Path, number: int) -> None:
    """Send a signal as soon as the script says that it has come to its end."""
    (folder / "train.py").write_text(source)
    before = processes()
    command = [sys.executable, "-m", "autosac", "run", "train.py", "--gpu", "h100-sxm-80gb", *options]
    environment = {**os.environ, "AUTOSAC_CACHE": str(cache)}
    with subprocess.Popen(
        command,
        cwd=folder,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
        preexec_fn=lambda: signal.signal(
            signal.SIGINT, signal.SIG_DFL
        ),  # which a background shell has told us to ignore
    ) as process:
        deadline = time.monotonic() + 120
        while not (folder / "there").exists() and time.monotonic() < deadline:
            time.sleep(0.05)
        if number == signal.SIGINT:
            os.killpg(process.pid, number)
        else:
            process.send_signal(number)
        try:
            assert process.wait(60) == 128 + number
        finally:
            process.kill()
    deadline = time.monotonic() + 30
    while (left := {pid for pid in processes() - before if _is_of(folder, pid)}) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not left
