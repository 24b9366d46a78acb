"""Launchers, which start a process for each GPU, are not run: who names one is told how to run the script."""

from __future__ import annotations

from typing import Any

import pytest

from autosac.cli.launchers import refusal

CASES = {
    "torch.distributed.run": (
        ["--nproc-per-node=8", "--nnodes", "2", "train.py", "--lr", "1"],
        "train.py --nproc 8 --nodes 2",
    ),
    "/usr/bin/torchrun": (["--standalone", "-m", "package.train"], "-m package.train --nproc N"),
    "accelerate.commands.launch": (
        ["--num_processes", "16", "--num_machines", "2", "a.py"],
        "a.py --nproc 8 --nodes 2",
    ),
    "deepspeed": (["--num_gpus", "4"], "SCRIPT --nproc 4"),
}


@pytest.mark.parametrize("launcher", CASES)
def test_a_launcher_is_refused_with_the_command_that_takes_its_place(launcher: str) -> None:
    """With its script and its numbers of GPUs and nodes; accelerate counts the GPUs of all nodes."""
    arguments, command = CASES[launcher]
    assert f"autosac run {command} ..." in refusal(launcher, arguments)
    assert ("ACCELERATE_MIXED_PRECISION" in refusal(launcher, arguments)) == launcher.startswith("accelerate")


def test_scripts_are_no_launchers() -> None:
    """Whatever arguments they have."""
    assert not refusal("train.py", ["--num_processes", "8"])


def test_nothing_runs_before_a_launcher_is_refused(autosac: Any) -> None:
    """It is wrong usage, in one line."""
    ended = autosac(
        "run", "-m", "accelerate.commands.launch", "--gpu", "h100-sxm-80gb", "--", "--num_processes", "2", "a.py"
    )
    assert ended.returncode == 2
    assert ended.stdout == ""
    assert ended.stderr.startswith("autosac: accelerate launch starts a process for each GPU")
    assert ended.stderr.count("\n") == 1


LAUNCHES = """
import sys, torch
from torch.distributed.launcher.api import LaunchConfig, elastic_launch
def main(size):
    model = torch.nn.Linear(size, size).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(2):
        model(torch.ones(4, size, device="cuda")).sum().backward()
        optimizer.step()
    return size
config = LaunchConfig(min_nodes=1, max_nodes=1, nproc_per_node=2)
if len(sys.argv) > 1:
    elastic_launch(config, sys.executable)("train.py")
print(elastic_launch(config, main)(64))
"""


def test_a_script_that_launches_a_function_runs_it_for_its_own_rank(run: Any) -> None:
    """As accelerate's ``notebook_launcher`` does it. A script that it launches is named."""
    ended = run(LAUNCHES, "--nproc", "2", "--rank", "0")
    assert (ended.returncode, ended.stdout.splitlines()[0]) == (0, "{0: 64}"), ended.stderr
    ended = run(LAUNCHES, "--nproc", "2", "--rank", "0", arguments=("again",))
    assert ended.returncode == 1
    assert "train.py for each GPU: run that script with --nproc 2" in ended.stderr
    assert "for each GPU: say how many with --nproc 2" in run(LAUNCHES).stderr
