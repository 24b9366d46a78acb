"""What the FSDP units of a model hold from one part of a microbatch to the next, and how they come to hold something else
without running anything.

Between the parts of a pipeline's microbatches a unit's parameters are sharded or gathered. A forward that frees parameters
leaves them sharded, a backward of a pipeline leaves them gathered until the last microbatch. Which operators a part runs
follows from that, and from which unit's parameters a unit's backward gathers ahead: those of the unit whose forward came
before. A unit that holds anything else there (a gather that nobody has waited for, shards on a smaller mesh) is in no state
that is known here.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from autosac.capture.record.storages import StorageTable


class UnitsState(NamedTuple):
    """Which units' parameters are gathered; before a backward, if not all are, which unit (its position) each one's gathers
    ahead, -1 for none.
    """

    gathered: tuple[bool, ...]
    ahead: tuple[int, ...]


class UnitsChange(NamedTuple):
    """What a part does to the units: their state before, which are gathered afterwards, the storages of all parameters then
    (-1 for what is not gathered), which units have run forward, in order, and how many forwards of each have run backward.
    """

    before: UnitsState
    gathered: tuple[bool, ...]
    storages: tuple[int, ...]
    forwards: tuple[int, ...]
    backwards: tuple[int, ...]


class FSDPUnits:
    """The FSDP units of a model, by their groups of parameters; none if it has none."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._groups = fsdp_groups(model)
        self._places = {id(group): place for place, group in enumerate(self._groups)}

    @property
    def _contexts(self) -> list[Any]:
        """What units share; before the first forward each has its own."""
        return list({id(group.comm_ctx): group.comm_ctx for group in self._groups}.values())

    @property
    def keep_parameters(self) -> bool:
        """Whether no forward frees parameters."""
        return not any(group._reshard_after_forward for group in self._groups)

    def state(self, *, backward: bool = False) -> UnitsState | None:
        """The present state, perhaps before a backward; None if it is not known here."""
        is_known = all(
            (group.is_sharded or group.is_unsharded)
            and group._all_gather_result is None
            and group._reshard_after_forward_event is None
            for group in self._groups
        )
        if not is_known or any(context.all_gather_state is not None for context in self._contexts):
            return None
        gathered = tuple(bool(group.is_unsharded) for group in self._groups)
        ahead = tuple(map(self._ahead_of, self._groups)) if backward and not all(gathered) else ()
        return UnitsState(gathered, ahead)

    def _ahead_of(self, group: Any) -> int:
        place = group._post_forward_indices[-1] - 1 if group._post_forward_indices else -1
        return -1 if place < 0 else self._places[id(group.comm_ctx.post_forward_order[place])]

    def storages(self, table: StorageTable) -> tuple[int, ...]:
        """The allocations of all gathered parameters; -1 for those that are not gathered."""
        return tuple(map(table.of, self._tensors()))

    def _tensors(self) -> list[torch.Tensor]:
        found: dict[int, torch.Tensor] = {}
        for group in self._groups:
            for parameter in group.fsdp_params:
                for tensor in (*parameter.all_gather_outputs, *parameter._unsharded_inner_tensors):
                    found.setdefault(id(tensor.untyped_storage()), tensor)
        return list(found.values())

    def passed(self) -> tuple[list[int], list[int]]:
        """How many forwards have been noted in each context, and how many of each unit have not run backward."""
        forwards = [len(context.post_forward_order) for context in self._contexts]
        return forwards, [len(group._post_forward_indices) for group in self._groups]

    def since(self, passed: tuple[list[int], list[int]]) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Which units have run forward since then, in order, and how many forwards of each have run backward."""
        forwards = [
            self._places[id(group)]
            for context, before in zip(self._contexts, passed[0], strict=True)
            for group in context.post_forward_order[before:]
        ]
        left = [len(group._post_forward_indices) for group in self._groups]
        backwards = [
            before + forwards.count(place) - now
            for place, (before, now) in enumerate(zip(passed[1], left, strict=True))
        ]
        return tuple(forwards), tuple(backwards)

    def become(self, change: UnitsChange, storages: Sequence[int], table: StorageTable) -> None:
        """Bring the units into the state after a part that has been logged, and not run: parameters lie in these storages."""
        tensors = self._tensors()
        with table.silent():
            for group, gathered in zip(self._groups, change.gathered, strict=True):
                if not gathered:
                    group._to_sharded()
            for tensor, storage in zip(tensors, storages, strict=True):
                tensor.untyped_storage().resize_(0 if storage < 0 else tensor.numel() * tensor.itemsize)
            for group, gathered in zip(self._groups, change.gathered, strict=True):
                if gathered and not group.is_unsharded:
                    group._to_unsharded()
        for tensor, storage in zip(tensors, storages, strict=True):
            table.hold(tensor, storage)
        for place in change.forwards:
            self._groups[place]._record_post_forward()
        for group, count in zip(self._groups, change.backwards, strict=True):
            del group._post_forward_indices[len(group._post_forward_indices) - count :]


def fsdp_groups(model: torch.nn.Module) -> list[Any]:
    """The groups of parameters that FSDP gathers together, in the order of their modules."""
    from torch.distributed.fsdp import FSDPModule

    found: list[Any] = []
    for module in model.modules():
        if isinstance(module, FSDPModule):
            state: Any = module._get_fsdp_state()
            groups = getattr(state, "_fsdp_param_groups", None)  # from torch 2.13 on
            found += [group for group in groups or [getattr(state, "_fsdp_param_group", None)] if group is not None]
    return found
