"""Optimizers' states that other ranks have: what this rank has of its own parameters tells what they have of theirs.

Ranks are taken to be alike, and what they exchange as objects is this rank's own. States of sharded optimizers differ from
rank to rank when a checkpoint gathers them: those of PyTorch's ZeroRedundancyOptimizer, and of the first FSDP with its
original parameters. Installed for scripts only.
"""

from __future__ import annotations

import functools
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from autosac.capture.patches.after_import import after_import


def install() -> None:
    """As soon as they are imported."""
    after_import("torch.distributed.optim.zero_redundancy_optimizer", _exchange_states)
    after_import("torch.distributed.fsdp._optim_utils", _parts_of_others)


def _parts_of_others(module: Any) -> None:
    """The first FSDP: other ranks have states of the parameters of which this rank's shard has no element."""
    keys_of, infos_of = module._map_param_key_to_optim_keys, module._allgather_state_info
    like: dict[int, Any] = {}  # of each number of ranks, what one has of a parameter

    @functools.wraps(keys_of)
    def keys(states: Any, group: Any, parameters: Any, names: Any, units: Any, merge_keys: bool = False) -> Any:
        everywhere, own = keys_of(states, group, parameters, names, units, merge_keys)
        if merge_keys:
            elsewhere = [names[parameter][0] for parameter in parameters.values() if not parameter.numel()]
            more = {module._OptimStateKey((name,), name in units) for name in elsewhere if name in units}
            everywhere = sorted({*everywhere, *more}) if states["state"] else everywhere
        return everywhere, own

    @functools.wraps(infos_of)
    def infos(fsdp: Any, states: Any) -> Any:
        found = infos_of(fsdp, states)
        own = found[fsdp.rank]
        full = next((info for info in own.values() if info.tensors), None) or like.get(fsdp.world_size)
        like[fsdp.world_size] = full
        others = {name: info if info.tensors or full is None else full for name, info in own.items()}
        return [own if rank == fsdp.rank else others for rank in range(len(found))]

    module._map_param_key_to_optim_keys = keys
    module._allgather_state_info = infos


def _exchange_states(module: Any) -> None:
    """What another rank sends when states are consolidated is what it has: states like this rank's, of its own parameters."""
    optimizer_class = module.ZeroRedundancyOptimizer
    original = optimizer_class.consolidate_state_dict

    @functools.wraps(original)
    def consolidate_state_dict(self: Any, *args: Any, **kwargs: Any) -> None:
        def exchanged(obj: Any, src_rank: int, group: Any, device: Any) -> Any:
            if src_rank != dist.get_rank():
                obj = _states_of(self, dist.get_group_rank(group, src_rank))
            tensors = [x for state in obj["state"].values() for x in state.values() if isinstance(x, torch.Tensor)]
            message = torch.empty(sum(x.nbytes for x in tensors), dtype=torch.uint8, device=device)
            dist.broadcast(message, src=src_rank, group=group)
            return obj

        with mock.patch.object(module, "_broadcast_object", exchanged):
            original(self, *args, **kwargs)

    optimizer_class.consolidate_state_dict = consolidate_state_dict


def _states_of(optimizer: Any, rank: int) -> dict[str, Any]:
    """The state dictionary of another rank's local optimizer."""
    own = optimizer.optim.state_dict()
    mine = [p for group in optimizer._partition_parameters()[optimizer.rank] for p in group["params"]]
    like = next(((mine[i], state) for i, state in own["state"].items()), None)
    groups: list[dict[str, Any]] = []
    states: dict[int, dict[str, Any]] = {}
    end = 0
    for group, theirs in zip(own["param_groups"], optimizer._partition_parameters()[rank], strict=True):
        begin, end = end, end + len(theirs["params"])
        groups.append({**group, "params": list(range(begin, end))})
        if like is not None:
            for i, parameter in enumerate(theirs["params"], begin):
                states[i] = {name: _like(value, like[0], parameter) for name, value in like[1].items()}
    return {"state": states, "param_groups": groups}


def _like(value: Any, of: torch.Tensor, parameter: torch.Tensor) -> Any:
    """What a state of the parameter `of` is for another parameter: averages have its shape, a number is what it is."""
    if isinstance(value, torch.Tensor) and value.dim() and value.shape == of.shape:
        return torch.empty_like(parameter, dtype=value.dtype, device=value.device)
    return value
