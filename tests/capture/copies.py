"""Captures of the same job whole, and with microbatches copied, for tests that compare them."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple, Protocol

from autosac.capture.process.server import CaptureServer
from autosac.capture.request import TitanRequest
from autosac.planning.planner import Goal, Planner, plan_of
from autosac.simulation import Target, simulation_of

# Reads a folder, the name of a habit and requests from each line, and answers each line with one. Each request is captured
# twice by a child, whole and with microbatches copied; it notes how often a method (owner and name are given) runs each time.
# The exit code of one that has to be captured whole is that of the capture process. Habits are those of models that do more in
# later forwards: "counting" counts them in the model, and does more in each fifth one; "growing from 4" counts them elsewhere,
# and does more from the fourth on; "returning" does more in its sixth backward; "remembering" keeps a result with its graph.
PROGRAM = """
import json, os, pkgutil, sys, torch
from dataclasses import replace
from pathlib import Path
from autosac.capture.process import worker
from autosac.capture.request import TitanRequest

torch.set_num_threads(1)  # as the worker does
server = worker.Worker(os.open(os.devnull, os.O_WRONLY), sys.argv[1], (sys.argv[1], ""))
server.preload(TitanRequest.from_json(sys.argv[2]))
owner = pkgutil.resolve_name(sys.argv[4])
runs = [0]
original = getattr(owner, sys.argv[5])

def counted(*args, **kwargs):
    runs[0] += 1
    return original(*args, **kwargs)

setattr(owner, sys.argv[5], counted)
calls = [0]

def counting(model, _, output):
    if type(model).__name__ == "Transformer":
        model.calls = getattr(model, "calls", 0) + 1
        return output * 1.0 if model.calls % 5 == 0 else output

def remembering(model, _, output):
    if type(model).__name__ == "Transformer":
        model.last = output.float().mean()  # with its graph

def growing(model, _, output):
    if type(model).__name__ == "Transformer":
        calls[0] += 1
        return output * 1.0 if calls[0] >= 4 else output

def more(gradient):
    calls[0] += 1
    return gradient * 1.0 if calls[0] == 6 else gradient

def returning(model, _, output):
    if type(model).__name__ == "Transformer" and output.requires_grad:
        output.register_hook(more)

habits = {"counting": counting, "remembering": remembering, "growing from 4": growing, "returning": returning}
for line in sys.stdin:
    folder, habit, *requests = json.loads(line)
    folder = Path(folder)
    for number, request in enumerate(map(TitanRequest.from_json, requests)):
        for name, repeats in ("whole", False), ("copied", True):
            child = os.fork()
            if not child:
                if habit:
                    torch.nn.modules.module.register_module_forward_hook(habits[habit])
                try:
                    server.capture(0, replace(request, repeats=repeats), str(folder / f"{number}.{name}"))
                    (folder / f"{number}.{name}.runs").write_text(str(runs[0]))
                    os._exit(0)
                finally:
                    os._exit(1)
            (folder / f"{number}.{name}.code").write_text(str(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])))
    os.write(int(sys.argv[3]), b"done\\n")
os._exit(0)
"""


class Captured(NamedTuple):
    """Exit code and trace of a capture, and how often the counted method has run."""

    code: int
    trace: bytes
    runs: int


class Both(Protocol):
    """Captures each request whole, and with microbatches copied; of a model with a habit, if it has one."""

    def __call__(
        self, folder: Path, requests: Sequence[TitanRequest], habit: str = ""
    ) -> list[tuple[Captured, Captured]]: ...


@contextlib.contextmanager
def capturing_both(folder: Path, like: TitanRequest, owner: str, method: str) -> Iterator[Both]:
    """Captures each request whole, and with microbatches copied, in children of one process that is ready for jobs `like` this
    one. Of each capture the calls of `method` of a class, `owner`, are counted.
    """
    answers, answering = os.pipe()
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, str(folder), like.to_json(), str(answering), owner, method],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        text=True,
        pass_fds=(answering,),
    )
    os.close(answering)

    def run(folder: Path, requests: Sequence[TitanRequest], habit: str = "") -> list[tuple[Captured, Captured]]:
        assert process.stdin is not None
        process.stdin.write(json.dumps([str(folder), habit, *(each.to_json() for each in requests)]) + "\n")
        process.stdin.flush()
        assert os.read(answers, 5) == b"done\n"
        return [(one(folder, f"{i}.whole"), one(folder, f"{i}.copied")) for i in range(len(requests))]

    with process, os.fdopen(answers):
        yield run


def one(folder: Path, name: str) -> Captured:
    """What a child has left of a capture."""
    code = int((folder / f"{name}.code").read_text())
    if code:
        return Captured(code, b"", 0)
    return Captured(code, (folder / name).read_bytes(), int((folder / f"{name}.runs").read_text()))


def requests_under_plans(asked: TitanRequest, server: CaptureServer, folder: Path) -> list[TitanRequest]:
    """An observed request under two plans: one that keeps nothing, and one that keeps every second result."""
    base = simulation_of(server.capture(asked), Target.of("h100-sxm-80gb", 2))
    planner = Planner(base, Goal(budget_bytes=1))
    plain = planner.smallest()
    policies = {unit.name: unit for unit in planner.policies.units}
    units = []
    for unit in plain.units:
        items = policies[unit.fqn].sac.problem.items
        kept = [i for i, item in enumerate(items) if (item.forced if item.forced is not None else i % 2 == 0)]
        units.append(policies[unit.fqn].keeping(kept))
    requests = []
    for name, plan in ("plain", plain), ("keeping", plan_of(base, planner.goal, tuple(units))):
        plan.save(folder / name)
        requests.append(replace(asked, checkpointing="plan", plan_file=str(folder / name), observe=False))
    return requests
