"""What each allocation holds: TorchSim section D.2, from a storage's label, the phase that made it and how
long it lived.

Capture labels what only it can know (parameters, gradients, optimizer states, inputs, unsharded parameters,
communication buffers). The rest follows from its life:

- made before or in the forward, in a recomputation, or between (loss): ACTIVATION if it is still alive when a
  backward operator runs next, else TEMPORARY. The same rule serves microbatches and recomputation: locals
  that outlive their module's forward hook are dead by then, saved tensors are not.
- made in the backward: ACTIVATION if it is copied from the host (where it has waited since the forward), else
  ACTIVATION_GRADIENT if a later operator or collective reads it, else TEMPORARY.
- made in the optimizer: TEMPORARY.
- found by the step without a label: BUFFER if it stays through the step, else TEMPORARY.
"""

from __future__ import annotations

from enum import IntEnum

import numpy as np
import numpy.typing as npt

from autosac.memory_sim.lifetimes import IntArray, Lifetimes
from autosac.trace import Collective, Label, Op, Phase, Trace


class Category(IntEnum):
    """What memory is used for."""

    PARAMETER = 0
    BUFFER = 1
    GRADIENT = 2
    OPTIMIZER_STATE = 3
    ACTIVATION = 4
    ACTIVATION_GRADIENT = 5
    TEMPORARY = 6
    UNSHARDED_PARAMETER = 7
    COMMUNICATION = 8
    INPUT = 9
    WORKSPACE = 10


OF_LABEL = {
    Label.PARAMETER: Category.PARAMETER,
    Label.BUFFER: Category.BUFFER,
    Label.GRADIENT: Category.GRADIENT,
    Label.OPTIMIZER_STATE: Category.OPTIMIZER_STATE,
    Label.INPUT: Category.INPUT,
    Label.UNSHARDED_PARAMETER: Category.UNSHARDED_PARAMETER,
    Label.COMMUNICATION: Category.COMMUNICATION,
}


def categorise(trace: Trace, lifetimes: Lifetimes) -> npt.NDArray[np.int8]:
    """The Category of every row of `lifetimes`."""
    storages = lifetimes.storages
    labels = np.fromiter((s.label for s in storages), dtype=np.int8, count=len(storages))[lifetimes.storage]
    phases = np.fromiter((s.phase for s in storages), dtype=np.int8, count=len(storages))[lifetimes.storage]
    category = np.full(len(labels), Category.TEMPORARY, dtype=np.int8)
    for label, named in OF_LABEL.items():
        category[labels == label] = named
    unlabelled = labels == Label.NONE
    found = lifetimes.begin < 0
    category[unlabelled & found & (lifetimes.end == lifetimes.events)] = Category.BUFFER

    reads, backward = _reads_and_backward(trace, len(storages))
    backward = np.append(backward, lifetimes.events)
    next_backward = backward[np.searchsorted(backward[:-1], lifetimes.begin, side="right")]
    in_backward = phases == Phase.BACKWARD
    kept = ~in_backward & (phases != Phase.OPTIMIZER) & (next_backward < lifetimes.end)
    kept &= next_backward < lifetimes.events
    category[unlabelled & ~found & kept] = Category.ACTIVATION
    category[unlabelled & ~found & in_backward & reads[lifetimes.storage]] = Category.ACTIVATION_GRADIENT
    category[unlabelled & ~found & in_backward & _from_host(trace, len(storages))[lifetimes.storage]] = (
        Category.ACTIVATION
    )
    category[lifetimes.storage >= lifetimes.first_workspace] = Category.WORKSPACE
    return category


def _from_host(trace: Trace, storages: int) -> npt.NDArray[np.bool_]:
    """Per storage: is it the target of a copy from the host?"""
    copies = {
        i
        for i, signature in enumerate(trace.signatures)
        if signature.name == "aten.copy_.default" and [meta.place for meta in signature.inputs] == ["device", "cpu"]
    }
    found = np.zeros(storages, dtype=np.bool_)
    found[[event.inputs[0] for event in trace.events if type(event) is Op and event.signature in copies]] = True
    return found


def _reads_and_backward(trace: Trace, storages: int) -> tuple[npt.NDArray[np.bool_], IntArray]:
    """Per storage: does anything but its maker read it? And the events that are backward operators."""
    read = np.zeros(storages, dtype=np.bool_)
    backward = []
    for i, event in enumerate(trace.events):
        if type(event) is Op or type(event) is Collective:
            for storage in event.inputs:
                if storage >= 0 and storage not in event.outputs:
                    read[storage] = True
            if event.phase is Phase.BACKWARD:
                backward.append(i)
    return read, np.array(backward, dtype=np.int64)
