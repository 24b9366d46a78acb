"""Families under the compiler: `gpt@aot_eager` is `gpt` with its units, or its whole model, compiled by aot_eager.

Plans decide about the operators of the model as it is, as those of `autosac.plan` do. They offload nothing (compiled code
refuses that), and some leave units, or all that is compiled, to a memory budget. With aot_eager results are compared bit
for bit, with Inductor as far as another order of sums explains. Inductor draws PyTorch's random numbers (`fallback_random`):
a plan may let it compile what is not compiled without (``Module.compile`` of an `nn.Sequential`). Where the compiler alone
computes something else than the model as it is, results under the plan may be those of either.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Sequence

import torch
from torch import nn
from torch._inductor import config as inductor_config

from benchmarks.fuzz.family import FAMILIES, Family, Job

BACKENDS = ("aot_eager", "inductor")


def family_of(name: str) -> Family | None:
    """The family of this name, which may end with ``@`` and a backend; None if there is none."""
    base, _, backend = name.partition("@")
    family = FAMILIES.get(base)
    if not backend or family is None:
        return family
    return _compiled(family, backend) if backend in BACKENDS and is_suitable(family) else None


def is_suitable(family: Family) -> bool:
    """Whether its model can be compiled on one process, and is not compiled already."""
    return family.ranks == 1 and not family.compiled


def compiled(model: nn.Module, units: Sequence[str], backend: str) -> nn.Module:
    """The model with these modules compiled each by itself; all of it as a whole if there are none."""
    torch._dynamo.reset()
    inductor_config.fallback_random = True
    for unit in units:
        model.get_submodule(unit).compile(backend=backend)
    return model if units else torch.compile(model, backend=backend)  # type: ignore[return-value] # torch says a function


def _compiled(family: Family, backend: str) -> Family:
    def build(rng: random.Random) -> Job:
        job = family.build(rng)
        units, inner = (job.units if rng.random() < 0.5 else ()), job.transform

        def transform(model: nn.Module) -> nn.Module:
            return inner(compiled(model, units, backend)) if units else compiled(inner(model), (), backend)

        job.transform, job.is_compiled_by_units = transform, bool(units)
        return job

    return dataclasses.replace(
        family,
        name=f"{family.name}@{backend}",
        about=f"{family.about}; compiled by {backend}",
        build=build,
        base=family,
        planner=False,
        limit_s=240.0 if backend == "inductor" else 120.0,
        compiled=True,
        rounds=backend == "inductor",
    )
