"""Checkpoints for which ranks gather the optimizers' states of others."""

from __future__ import annotations

from typing import Any

import pytest

FIRST_FSDP = """
import torch
import torch.distributed as dist
from torch.distributed.fsdp import FullOptimStateDictConfig, FullStateDictConfig, StateDictType
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP

dist.init_process_group("nccl")
model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 3), torch.nn.Linear(3, 2, bias=False))
model[1] = FSDP(model[1].cuda(), use_orig_params=True)
model = FSDP(model.cuda(), use_orig_params=True)
optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
for step in range(2):
    model(torch.randn(4, 64, device="cuda")).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
kept = FullStateDictConfig(offload_to_cpu=True, rank0_only=True), FullOptimStateDictConfig(rank0_only=False)
with FSDP.state_dict_type(model, StateDictType.FULL_STATE_DICT, *kept):
    states = FSDP.optim_state_dict(model, optimizer)
    for name, state in sorted(states["state"].items()):
        print(name, tuple(state["exp_avg"].shape), float(state["step"]))
    optimizer.load_state_dict(FSDP.optim_state_dict_to_load(model, optimizer, states))
print("loaded", len(optimizer.state))
"""


@pytest.mark.usefixtures("warm")
@pytest.mark.parametrize("nproc", [2, 8])
def test_the_first_fsdp_gathers_states_of_parameters_that_other_ranks_have(
    autosac: Any, command: Any, nproc: int
) -> None:
    """A rank's shard may have no element of a parameter; the checkpoint has the states of all, and can be loaded again."""
    run = autosac(*command(FIRST_FSDP, "--nproc", str(nproc), "--steps", "0"))
    assert run.returncode == 0, run.stdout + run.stderr
    assert run.stdout.splitlines()[:6] == [
        "0.bias (64,) 2.0",
        "0.weight (64, 64) 2.0",
        "1.bias (3,) 2.0",
        "1.weight (3, 64) 2.0",
        "2.weight (2, 3) 2.0",
        "loaded 2",  # those of which this rank has a part
    ]
