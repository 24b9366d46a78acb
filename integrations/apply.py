"""Applying a plan to a PyTorch model: `apply` makes each planned module a checkpointed one.

A checkpointed module (`Checkpointed`) runs its forward as it is. What autograd saves in it is exchanged for what the plan
keeps and a tape of the operators, from which the rest is made again in the backward (`tape`, `recomputation`). In a module
that is being compiled, PyTorch's own selective checkpointing takes the same decisions: the compiler understands only that,
and turns the decisions into tags on its graph (`compiled_modes`). What a plan leaves to the compiler is a memory budget of its
partitioner: of a unit's own graph, or of all that is compiled.

It composes with FSDP, tensor parallelism and `torch.compile` in TorchTitan's order: tensor parallelism, `apply`, compile,
FSDP. Before anything is changed, the plan is compared with the model (`check`).
"""

from __future__ import annotations

import contextlib
import hashlib
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from types import GeneratorType
from typing import Any

import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import ActivationWrapper
from torch.utils.checkpoint import checkpoint

from autosac.errors import PlanError, PlanNotFollowedError
from autosac.integrations.operators.dispatching import not_compiled
from autosac.integrations.operators.keys import quiet_hooks
from autosac.integrations.operators.modules import clean_name, find_module, has_compiled, parameters_of, unwrapped
from autosac.integrations.optimizer_slices import follow_slices, slice_optimizers
from autosac.integrations.partitioner import last_traced, save_what_changes
from autosac.integrations.recompute import compiled_classes, compiled_parts, constructors, transforms
from autosac.integrations.recompute.compiled_modes import context_fn
from autosac.integrations.recompute.entries import RecomputationError
from autosac.integrations.recompute.offload import Offloader
from autosac.integrations.recompute.policy import PlanMismatchWarning, UnitDecisions
from autosac.integrations.recompute.sharding import Gathering
from autosac.integrations.recompute.tape import RecordingMode, Tape
from autosac.integrations.recompute.units import UnitModule, become, is_transformed, new
from autosac.plans import Decision, Plan, Settings, Unit

__all__ = ["PlanMismatchWarning", "RecomputationError", "apply", "check", "switch"]

# How many forwards of each unit on an accelerator have their recomputation compared with what was saved; on the CPU all have.
AUDITED_FORWARDS = 2
_HAS_BUDGETS = hasattr(torch.autograd.graph, "region_activation_memory_budget")  # from torch 2.13 on


def apply(model: nn.Module, plan: Plan) -> nn.Module:
    """Make every unit of the plan inside `model` a checkpointed module; `model` is changed in place and returned.

    Call it before `torch.compile` and before FSDP's `fully_shard`. PlanError, before anything is changed, if
    the plan was made for another model; it names the first difference.
    """
    _install(check(model, plan), plan)
    follow_slices(plan)
    if plan.needs_compiler:
        _set_partitioner(plan.settings.memory_budget)
    return model


def switch(model: nn.Module, plan: Plan) -> nn.Module:
    """Make a model that follows a plan, or none, follow this one from its next forward on. Not between forward and backward.

    It may be sharded by FSDP already, but not compiled: compiled code does not change. PlanError, before anything is changed,
    for that, for a plan that needs the compiler, and as of `apply`.
    """
    if plan.needs_compiler:
        raise PlanError("the plan is for a compiled model, which cannot be changed while it runs")
    present = {module: module._autosac for module in model.modules() if isinstance(module, Checkpointed)}
    for module in present:
        module.__dict__["_autosac"] = None
    try:
        units = check(model, plan)
    except PlanError:
        for module, state in present.items():
            module.__dict__["_autosac"] = state
        raise
    _install(units, plan)
    slice_optimizers(plan.settings.optimizer_slice_bytes)
    return model


def _install(units: Sequence[tuple[Unit, nn.Module]], plan: Plan) -> None:
    offloader = Offloader() if plan.offloads else None
    for unit, module in units:
        state = _Checkpointing(unit, plan.settings, offloader)
        if isinstance(module, Checkpointed):
            module.__dict__["_autosac"] = state
        else:
            become(module, Checkpointed, state, _variant(unit, plan.settings))
            _names[type(module)] = unit.fqn


def _set_partitioner(budget: float) -> None:
    """For all that is compiled from now on."""
    from torch._functorch import config  # which `import torch` does not import

    save_what_changes()
    if budget != 1:
        config.activation_memory_budget = budget
    if hasattr(config, "unsafe_treat_script_objects_as_zero_size"):
        # Of graphs under tensor parallelism meshes are inputs; torch 2.13 fails if it is to say how large they are.
        config.unsafe_treat_script_objects_as_zero_size = True


def _variant(unit: Unit, settings: Settings) -> str:
    """Equal for units that are compiled alike."""
    return hashlib.sha256(repr((unit.policy, settings)).encode()).hexdigest()[:16]


class Checkpointed(UnitModule):
    """A module under a plan."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The module's result, of which less is saved for the backward."""
        state: _Checkpointing | None = self._autosac
        if state is None:
            return self.original_forward(*args, **kwargs)
        if torch.compiler.is_compiling():
            return state.in_one_piece(self, args, kwargs)
        if not torch.is_grad_enabled() or is_transformed():
            return self.original_forward(*args, **kwargs)
        if torch._guards.TracingContext.try_get() is not None:
            return state.compiled(self.original_forward, *args, **kwargs)
        return state.run(self, args, kwargs)


class _Checkpointing:
    """What a checkpointed module keeps beside itself. Copies of the module share it."""

    def __init__(self, unit: Unit, settings: Settings, offloader: Offloader | None) -> None:
        self._made_of = unit, settings
        self.policy = UnitDecisions(unit)
        self.compiled: Callable[..., Any] = (
            partial(_within_budget, repr(unit.memory_budget))
            if unit.memory_budget is not None
            else partial(
                checkpoint,
                use_reentrant=False,
                preserve_rng_state=True,  # without it a recomputed dropout would be another one
                early_stop=settings.early_stop,
                context_fn=context_fn(self.policy, offloads=offloader is not None),
            )
        )
        self._of_compiler = unit.memory_budget is not None
        self._offloader = offloader
        self.forwards = 0  # so far

    def __deepcopy__(self, memo: Any) -> _Checkpointing:
        """Plans do not change."""
        return self

    def __reduce__(self) -> Any:
        """Pickled by what it was made of."""
        return _checkpointing, (*self._made_of, self._offloader is not None)

    def in_one_piece(self, module: Checkpointed, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """One forward inside of what is being compiled; without the compiler, if the graph breaks in the module.

        PyTorch's checkpointing would run broken code in Python a second time: with other numbers of Python's and numpy's
        generators, and counters that count twice. A generator that is returned has yet to run, which Dynamo cannot do outside
        of what is checkpointed.
        """
        _seen_by_compiler(type(module))
        with _unbroken():
            if torch.compiler.is_compiling():
                out = self.compiled(module.original_forward, *args, **kwargs)
                if _has_generator(out):
                    torch._dynamo.graph_break()
                return out
        if self._of_compiler:
            raise PlanNotFollowedError(
                f"the plan gives {self.policy.fqn} a memory budget of its own, but the module cannot be compiled in one "
                "piece: remove the graph break inside, or make the plan with the model as it is"
            )
        return torch._dynamo.disable(self.run)(module, args, kwargs)

    @not_compiled
    def run(self, module: Checkpointed, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """One forward with gradients, outside of compiled code."""
        if self._of_compiler:
            self._without_compiler(module)
        compiled_parts.prepare()
        if not self.forwards:
            quiet_hooks(module)
            transforms.prepare()
            constructors.prepare()
        self.forwards += 1
        tape = Tape(self.policy, self._offloader, forward=self.forwards, audited=self.forwards <= AUDITED_FORWARDS)
        tape.gathering = Gathering(module)
        with torch.autograd.graph.saved_tensors_hooks(tape.pack, tape.unpack), RecordingMode(tape):
            out = module.original_forward(*args, **kwargs)
        tape.complete(out)
        if self._offloader is not None:
            self._offloader.forward_ended(tape)
        return out

    def _without_compiler(self, module: Checkpointed) -> None:
        """The unit runs as it is, but has a budget. That is refused, if the compiler has never seen it.

        Dynamo gives a module up while the job runs: for an error that the user's code raises, after too many shapes; a copy
        of a compiled module is not compiled. Such a unit keeps nothing, which takes no more memory than its budget.
        """
        if type(module) not in _known_to_compiler:
            raise PlanNotFollowedError(
                f"the plan leaves {self.policy.fqn} to the compiler, but the module is not compiled: compile it, or plan for "
                "the job as it is"
            )
        self.policy.warn(
            "has a memory budget and is not compiled now (a copy, an error in its forward, or too many shapes)",
            "recomputing all of it",
        )


_known_to_compiler: set[type] = set()
_names: dict[type, str] = {}  # of a unit of each class: units with equal policies are compiled alike


def _seen_by_compiler(kind: type[Checkpointed]) -> None:
    """Dynamo runs this while it compiles a unit of this class."""
    _known_to_compiler.add(kind)
    last_traced[0] = _names.get(kind, kind.__name__)
    compiled_classes.watch()


_seen_by_compiler._dynamo_marked_constant = True  # type: ignore[attr-defined] # torch.compiler's decorator imports Dynamo


@contextlib.contextmanager
def _unbroken() -> Iterator[None]:
    """Dynamo compiles what is inside as a whole, or runs the function around as it is: it cannot resume in here."""
    yield


def _has_generator(out: Any) -> bool:
    """Whether a result is a generator, or a list, tuple or dictionary with one. The compiler runs this."""
    if isinstance(out, list | tuple):
        return any(map(_has_generator, out))
    if isinstance(out, dict):
        return any(map(_has_generator, out.values()))
    return isinstance(out, GeneratorType)


def _units(model: nn.Module) -> list[_Checkpointing]:
    return [
        module._autosac
        for module in model.modules()
        if isinstance(module, Checkpointed) and module._autosac is not None
    ]


def planned_modules(model_parts: Iterable[nn.Module]) -> tuple[str, ...]:
    """Clean names, sorted, of the modules that follow a plan."""
    return tuple(
        sorted(
            clean_name(name)
            for part in model_parts
            for name, module in unwrapped(part).named_modules()
            if isinstance(module, Checkpointed) and module._autosac is not None
        )
    )


def forwards_of(model: nn.Module) -> tuple[int, ...]:
    """How often each unit inside of a model has run forward under its plan, in the model's order."""
    return tuple(unit.forwards for unit in _units(model))


def add_forwards(model: nn.Module, counts: Sequence[int]) -> None:
    """Number the units' next forwards as if they had run so many more."""
    for unit, count in zip(_units(model), counts, strict=True):
        unit.forwards += count


def _within_budget(budget: str, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """The module's result; the partitioner of its graph obeys the budget (a text: Dynamo makes variables of numbers)."""
    with torch.autograd.graph.region_activation_memory_budget(float(budget)):
        return forward(*args, **kwargs)


def _checkpointing(unit: Unit, settings: Settings, offloads: bool) -> _Checkpointing:
    return _Checkpointing(unit, settings, Offloader() if offloads else None)


# A model that was saved whole under its plan can be loaded by whoever allows the model's own classes (`weights_only`).
torch.serialization.add_safe_globals([Checkpointed, Decision, Settings, Unit, _checkpointing, new])


def check(model: nn.Module, plan: Plan) -> list[tuple[Unit, nn.Module]]:
    """The plan's units with their modules in `model`; PlanError names the first difference between plan and
    model.

    A plan for several pipeline stages may have units that this part of the model has not.
    """
    own = plan.settings.job_checkpointing
    if own:
        raise PlanError(
            f"the plan is TorchTitan's own {own} checkpointing: only a TorchTitan job can follow it, by AutoSAC's plugin"
        )
    partial = check_model(model, plan)
    found = []
    if any(unit.memory_budget is not None for unit in plan.units) and not _HAS_BUDGETS:
        raise PlanError(
            f"the plan gives modules memory budgets of their own, which torch {torch.__version__} does not support"
        )
    for unit in plan.units:
        module = find_module(model, unit.fqn)
        if module is None:
            if partial:
                continue
            raise PlanError(f"the plan was made for another model: it checkpoints {unit.fqn}, which is not there")
        _check_module(unit, module)
        found.append((unit, module))
    return found


def check_model(model: nn.Module, plan: Plan) -> bool:
    """PlanError if the plan was made for a model with other parameters, a warning if with another torch. Whether it is for
    several pipeline stages, of which the model may be a part.
    """
    partial = plan.made_for.pipeline_stages > 1
    _compare(dict(parameters_of(model)), dict(plan.made_for.parameters), "the model", partial=partial)
    version = plan.made_for.torch_version
    if version.split(".")[:2] != torch.__version__.split(".")[:2]:
        warnings.warn(f"the plan was made with torch {version}; this is {torch.__version__}", stacklevel=4)
    return partial


def _check_module(unit: Unit, module: nn.Module) -> None:
    if any(_is_checkpointed(inner) for inner in module.modules()):
        raise PlanError(f"{unit.fqn} has activation checkpointing already: apply the plan to a model without it")
    if has_compiled(module):
        raise PlanError(f"{unit.fqn} is compiled already: apply the plan before torch.compile")
    if isinstance(module, torch.jit.ScriptModule):
        raise PlanError(f"{unit.fqn} is a TorchScript module, whose operators cannot be seen: leave it out of the plan")
    if type(module).forward is nn.Module.forward and "forward" not in vars(module):
        raise PlanError(f"{unit.fqn} is a {type(module).__name__}, which is never called: choose modules inside it")
    _compare(dict(parameters_of(module)), dict(unit.parameters), unit.fqn, partial=False)


def _is_checkpointed(module: nn.Module) -> bool:
    return isinstance(module, ActivationWrapper) or (isinstance(module, Checkpointed) and module._autosac is not None)


def _compare(
    running: dict[str, tuple[int, ...]], planned: dict[str, tuple[int, ...]], where: str, *, partial: bool
) -> None:
    if not planned:
        return
    what = "the plan was made for another model"
    for name, shape in running.items():
        if name not in planned:
            raise PlanError(f"{what}: {where} has a parameter {name}, the plan's model does not")
        if shape != planned[name]:
            raise PlanError(f"{what}: {name} of {where} is {list(shape)}, the plan's is {list(planned[name])}")
    if not partial:
        for name in planned:
            if name not in running:
                raise PlanError(f"{what}: the plan's model has a parameter {name}, {where} does not")
