"""Microbatches of pipelines whose layers hold tensors from one to the next (experts), or compile (flex attention)."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from autosac.capture.jobs.held_tensors import HeldTensors
from autosac.capture.record.log import EventLog
from autosac.capture.record.phases import OperatorPlace
from autosac.capture.record.storages import StorageTable
from autosac.titan.version import has_python_jobs
from autosac.trace import Alloc, Free, Label, Phase
from tests.capture.copies import Both, capturing_both
from tests.capture.test_microbatches import ALWAYS, STEPS, request

COUNT = 12
_EXPERTS = ("--model.name", "deepseek_v3", "--parallelism.expert_parallel_degree", "2")
_FLEX = (*_EXPERTS, "--model.flavor", "debugmodel_flex_attn")
_LLAMA4 = ("--model.name", "llama4", "--parallelism.expert_parallel_degree", "2")
_WHOLE_EXPERTS = ("--parallelism.expert_tensor_parallel_degree", "1", "--parallelism.expert_parallel_degree", "4")
expert_job = functools.partial(request, sharding=2, count=COUNT)
# How many of 2 steps' 12 microbatches run, of both stages of a rank if it has two. A dispatch that graphs hold, too, is freed
# in backwards or in forwards, depending on what has run before: then there are more kinds of parts. Where Dynamo compiles
# again in the second microbatch of the first step, that one is like no other.
JOBS = {
    "1F1B, full": (expert_job("1F1B", 0, more=_EXPERTS, checkpointing="full"), 7),
    "1F1B": (expert_job("1F1B", 0, more=_EXPERTS), 9),
    "1F1B, last": (expert_job("1F1B", 1, more=_EXPERTS), 7),
    "1F1B, freed, full": (expert_job("1F1B", 0, more=_EXPERTS + ALWAYS, checkpointing="full"), 9),
    "Interleaved1F1B, full": (
        expert_job("Interleaved1F1B", 0, more=_EXPERTS, checkpointing="full", layers=None),
        14,
    ),
    "Interleaved1F1B, selective, observed": (
        expert_job("Interleaved1F1B", 0, more=_EXPERTS, checkpointing="selective-op", observe=True, layers=None),
        17,
    ),
    "LoopedBFS, freed": (expert_job("LoopedBFS", 0, more=_EXPERTS + ALWAYS, layers=None), 20),
    "GPipe, experts whole under TP": (
        expert_job("GPipe", 1, tensor=2, more=_EXPERTS + _WHOLE_EXPERTS, checkpointing="full"),
        7,
    ),
    "1F1B, Llama 4, compiled": (expert_job("1F1B", 0, more=(*_LLAMA4, "--compile.enable"), checkpointing="full"), 7),
    "1F1B, flex": (expert_job("1F1B", 0, more=_FLEX), 9),
    "1F1B, flex, last, full": (expert_job("1F1B", 1, more=_FLEX, checkpointing="full"), 8),
    "1F1B, accumulated": (
        expert_job("1F1B", 0, more=(*_EXPERTS, "--training.global_batch_size", "48"), checkpointing="full"),
        14,
    ),
}


@pytest.fixture(scope="module")
def captured(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Both]:
    """Captures each request whole, and with microbatches copied, counting forwards of stages."""
    owner, method = "torch.distributed.pipelining.stage:_PipelineStageBase", "forward_maybe_with_nosync"
    with capturing_both(tmp_path_factory.mktemp("worker"), request("1F1B"), owner, method) as both:
        yield both


@pytest.mark.skipif(has_python_jobs(), reason="the jobs are TorchTitan 0.2's")
@pytest.mark.parametrize("name", JOBS)
def test_copied_microbatches_of_experts_change_nothing(tmp_path: Path, captured: Both, name: str) -> None:
    """The traces are the same, and few microbatches have run."""
    asked, count = JOBS[name]
    ((whole, copied),) = captured(tmp_path, (replace(asked),))
    assert (whole.code, copied.code) == (0, 0)
    assert whole.trace == copied.trace
    assert copied.runs == count < whole.runs == STEPS * COUNT * (whole.runs // (STEPS * COUNT))


# ---- what objects hold ----------------------------------------------------------------------------------------------


class _Dispatch:
    """Holds tensors as expert parallelism does: in its attributes, and in a list and a dictionary of its own."""

    def __init__(self) -> None:
        self.order: torch.Tensor | None = None
        self.several: list[object] = [None, (self, 3)]
        self.named: dict[str, object] = {}

    def hook(self, *_: object) -> None:
        """A forward hook."""


def _model(dispatch: _Dispatch) -> nn.Sequential:
    model = nn.Sequential(nn.Identity(), nn.Linear(2, 2, device="meta"))
    closed: list[torch.Tensor] = []

    def remember(*_: object) -> None:
        closed.append(torch.empty(0))

    model[0].register_forward_pre_hook(functools.partial(dispatch.hook, 1))
    model[1].register_forward_hook(remember)
    return model


def _returned(table: StorageTable, tensor: torch.Tensor) -> int:
    return table.returned(tensor, "aten.full.default", 0, OperatorPlace(Phase.FORWARD, 2, 7), Label.NONE)


def test_tensors_that_objects_hold_are_found() -> None:
    """In attributes, lists and dictionaries of an object of which a hook is a method, in what a hook has closed over, and in
    a module's own attribute; parameters are left out. What is let go of again is -1.
    """
    with FakeTensorMode():
        dispatch, table = _Dispatch(), StorageTable(EventLog(), "cpu")
        model, tensors = _model(dispatch), [torch.empty(number + 1) for number in range(4)]
        held = HeldTensors(model)
        held.find()
        assert held.numbers(table) == ()
        dispatch.order, dispatch.several[0], dispatch.named["one"], model[1].last = tensors
        numbers = [_returned(table, tensor) for tensor in tensors]
        held.find()
        assert held.numbers(table) == tuple(numbers)
        dispatch.order = None
        held.find()
        assert held.numbers(table) == (-1, *numbers[1:])


def test_what_is_far_away_is_no_part_of_a_model() -> None:
    """A chain of a thousand dictionaries that ends in a tensor is followed for some links only, and without an error."""
    chain: dict[str, object] = {"last": torch.empty(1)}
    for _ in range(1000):
        chain = {"next": chain}
    model = nn.Identity()
    model.near, model.chain = {"last": torch.empty(1)}, chain  # type: ignore[assignment]
    held = HeldTensors(model)
    held.find()
    assert len(held.tensors()) == 1


def test_who_else_holds_a_tensor() -> None:
    """One that nobody else holds ends when it is let go of, which is not logged, and another one takes its place; one that a
    view elsewhere holds as well, too, is put back.
    """
    with FakeTensorMode():
        log, dispatch = EventLog(), _Dispatch()
        table, held = StorageTable(log, "cpu"), HeldTensors(_model(dispatch))

        def remade() -> torch.Tensor:
            tensor = torch.empty(4)
            table.adopt(tensor, 0)
            return tensor

        dispatch.order = torch.empty(4)
        assert _returned(table, dispatch.order) == 0
        held.find()
        assert held.is_shared(0, table, remade) is False
        assert held.numbers(table) == (0,) and log.events == [Alloc(0)]
        elsewhere = [dispatch.order]
        assert held.is_shared(0, table, remade) is True
        assert dispatch.order is elsewhere[0]
        elsewhere.clear()
        held.put(0, torch.empty(1))
        assert log.events == [Alloc(0), Free(0)]
