"""Applying a plan to a PyTorch model: `apply` wraps each planned module in `torch.utils.checkpoint`.

The wrapper is PyTorch's `checkpoint_wrapper`, without reentrant autograd, as TorchTitan uses it, so that it
composes with FSDP, tensor parallelism and `torch.compile` in the same order: tensor parallelism, `apply`,
compile, FSDP. Before anything is changed, the plan is compared with the model (`check`). Three kinds of
units:

- nothing is kept: plain checkpointing, which costs no host time per operator;
- otherwise `replay`'s pair of dispatch modes (`_contexts`);
- in a module that is being compiled, PyTorch's own selective checkpoint modes with the same decisions: the
  compiler only understands those, and turns the decisions into tags on its graph (`_compiled_contexts`).
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import ActivationWrapper, checkpoint_wrapper
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from autosac.errors import PlanError
from autosac.integrations.keys import Keyer, op_name, quiet_hooks
from autosac.integrations.modules import Places, find_module, is_compiled, parameters_of
from autosac.integrations.offload import Offloader
from autosac.integrations.replay import Memo, PlanMismatchWarning, ReplayMode, SavingMode, UnitPolicy
from autosac.plans import Plan, Unit

__all__ = ["PlanMismatchWarning", "apply", "check"]


def apply(model: nn.Module, plan: Plan) -> nn.Module:
    """Wrap every unit of the plan inside `model`, which is changed in place and returned.

    Call it before `torch.compile` and before FSDP's `fully_shard`. PlanError, before anything is changed, if
    the plan was made for another model; it names the first difference.
    """
    units, places = check(model, plan), Places(model)
    offloader = Offloader() if plan.offloads else None
    for unit, module in units:
        kwargs: dict[str, Any] = {
            "preserve_rng_state": plan.settings.preserve_rng_state,
            "early_stop": plan.settings.early_stop,
        }
        if any(decision.keep for decision in unit.decisions):
            policy = UnitPolicy(unit, preserve_rng_state=plan.settings.preserve_rng_state, offloader=offloader)
            kwargs["context_fn"] = _context_fn(policy, module)
        wrapper = checkpoint_wrapper(module, **kwargs)
        if offloader is not None and "context_fn" not in kwargs:
            wrapper.register_forward_hook(partial(_settle, offloader))
        places.replace(module, wrapper)
    return model


def _settle(offloader: Offloader, *_: Any) -> None:
    """After the forward of a unit that is checkpointed plainly: another unit's results may be let go."""
    offloader.settle()


def check(model: nn.Module, plan: Plan) -> list[tuple[Unit, nn.Module]]:
    """The plan's units with their modules in `model`; PlanError names the first difference between plan and
    model.

    A plan for several pipeline stages may have units that this part of the model has not.
    """
    running = parameters_of(model)
    partial = plan.made_for.pipeline_stages > 1
    _compare(dict(running), dict(plan.made_for.parameters), "the model", partial=partial)
    found = []
    for unit in plan.units:
        module = find_module(model, unit.fqn)
        if module is None:
            if partial:
                continue
            raise PlanError(f"the plan was made for another model: it checkpoints {unit.fqn}, which is not there")
        if any(isinstance(inner, ActivationWrapper) for inner in module.modules()):
            raise PlanError(f"{unit.fqn} has activation checkpointing already: apply the plan to a model without it")
        if any(is_compiled(inner) for inner in module.modules()):
            raise PlanError(f"{unit.fqn} is compiled already: apply the plan before torch.compile")
        _compare(dict(parameters_of(module)), dict(unit.parameters), unit.fqn, partial=False)
        found.append((unit, module))
    version = plan.made_for.torch_version
    if version.split(".")[:2] != torch.__version__.split(".")[:2]:
        warnings.warn(f"the plan was made with torch {version}; this is {torch.__version__}", stacklevel=3)
    return found


def _compare(
    running: dict[str, tuple[int, ...]], planned: dict[str, tuple[int, ...]], where: str, *, partial: bool
) -> None:
    if not planned:
        return
    what = "the plan was made for another model"
    for name, shape in running.items():
        if name not in planned:
            raise PlanError(f"{what}: {where} has a parameter {name}, the plan's has not")
        if shape != planned[name]:
            raise PlanError(f"{what}: {name} of {where} is {list(shape)}, the plan's is {list(planned[name])}")
    if not partial:
        for name in planned:
            if name not in running:
                raise PlanError(f"{what}: the plan's has a parameter {name}, {where} has not")


def _context_fn(policy: UnitPolicy, module: nn.Module) -> Callable[[], tuple[Any, Any]]:
    prepared = False

    def contexts() -> tuple[Any, Any]:
        if torch.compiler.is_compiling() or torch._guards.TracingContext.try_get() is not None:
            return _compiled_contexts(policy)
        nonlocal prepared
        if not prepared:
            quiet_hooks(module)
            prepared = True
        memo = Memo(policy)
        return SavingMode(memo), ReplayMode(memo)

    return contexts


def _compiled_contexts(policy: UnitPolicy) -> tuple[Any, Any]:
    """PyTorch's modes with the plan's decisions, for the compiler.

    What differs from the plan is recomputed. PlanError if it offloads: the compiler knows of no such thing.
    """
    if policy.offloader is not None:
        raise PlanError(f"{policy.fqn} is compiled and its plan offloads to host memory: make the plan without offloading")
    keyers = {False: Keyer(), True: Keyer()}

    def decide(context: Any, func: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        occurrence = keyers[context.is_recompute].occurrence(func)
        if occurrence < 0:
            return CheckpointPolicy.PREFER_RECOMPUTE
        rows = policy.decisions(func)
        if occurrence >= len(rows):
            policy.warn(
                f"as compiled runs more calls of {op_name(func)} than the plan's {len(rows)}",
                "recomputing this operator",
            )
            return CheckpointPolicy.PREFER_RECOMPUTE
        return CheckpointPolicy.MUST_SAVE if rows[occurrence].keep else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(decide)
