"""The policies that are compared, by name, and those of them that eager models get as plans.

==================  =============================================================================================
none                nothing is checkpointed
full                every block is checkpointed, nothing of it kept
selective-N         every N-th block is checkpointed (TorchTitan's layer-wise selective checkpointing)
selective-op        every block; attention, and every second matrix product of it, are kept (TorchTitan's list)
memory-budget-F     torch.compile decides, AOTAutograd's min-cut partitioner with activation_memory_budget = F;
                    TorchTitan jobs only
NAME+early-stop     full, selective-N or selective-op, each recomputation ending with what the backward needs last
                    (TorchTitan's early_stop, off by default); TorchTitan jobs only
pareto, ilp,        AutoSAC with this local solver, under the budget
greedy, knapsack
joint               AutoSAC with one MILP over all operators of all modules (the exact reference)
pytorch-tools       PyTorch's own planner, `torch.distributed._tools`, under the budget (`pytorch_tools`)
==================  =============================================================================================

TorchTitan jobs run TorchTitan's own checkpointing; eager models get the same as a plan (`block_plan`). Their blocks are the
modules that match the model's patterns in the suite; without patterns, the outermost members of numbered containers.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from autosac.choices import SOLVERS
from autosac.errors import UsageError
from autosac.planning.planner import Goal, plan_of
from autosac.planning.unit_policies import UnitPolicies, UnitPolicy
from autosac.plans import Plan, Unit

JOINT = "joint"
TOOLS = "pytorch-tools"
PLANNED = (*SOLVERS, JOINT)  # by AutoSAC
_FIXED = ("none", "full", "selective-op")
_EARLY = "+early-stop"
# What TorchTitan's selective-op keeps, as far as eager models run it (its matrix products: every second one).
_KEPT_OPERATORS = frozenset(
    {
        "aten._scaled_dot_product_efficient_attention.default",
        "aten._scaled_dot_product_flash_attention.default",
        "aten._scaled_dot_product_flash_attention_for_cpu.default",
        "aten._scaled_dot_product_cudnn_attention.default",
        "aten._scaled_dot_product_attention_math.default",
        "aten._scaled_dot_product_fused_attention_overrideable.default",
        "aten.max.default",
    }
)


@dataclass(frozen=True, slots=True)
class Policy:
    """A policy by its name. UsageError for an unknown one."""

    name: str

    def __post_init__(self) -> None:
        names = ("full", "selective-op") if self.stops_early else (*_FIXED, *PLANNED, TOOLS)
        if not (self.mode in names or self.layer_interval or self.memory_budget is not None):
            raise UsageError(
                f"unknown policy {self.name!r}: choose from {', '.join(_FIXED)}, selective-N (N >= 1), each but none also "
                f"with {_EARLY}, memory-budget-F (0 <= F <= 1), {', '.join(PLANNED)}, {TOOLS}"
            )

    @property
    def stops_early(self) -> bool:
        """Recomputation ends with what the backward needs last."""
        return self.name.endswith(_EARLY)

    @property
    def mode(self) -> str:
        """What is checkpointed, early stop or not."""
        return self.name.removesuffix(_EARLY)

    @property
    def planned(self) -> bool:
        """It is found for a budget."""
        return self.name in (*PLANNED, TOOLS)

    @property
    def layer_interval(self) -> int | None:
        """The N of selective-N."""
        match = re.fullmatch(r"selective-([1-9][0-9]{0,8})", self.mode)
        return int(match[1]) if match else None

    @property
    def memory_budget(self) -> float | None:
        """The F of memory-budget-F."""
        match = re.fullmatch(r"memory-budget-([01](?:\.[0-9]{1,18})?)", self.name)
        return float(match[1]) if match and float(match[1]) <= 1 else None


def blocks_of(policies: UnitPolicies, patterns: Sequence[str]) -> list[UnitPolicy]:
    """The model's blocks, in the model's order. UsageError if a pattern matches no module that may be checkpointed."""
    if not patterns:
        found = [unit for unit in policies.units if unit.name.rpartition(".")[2].isdigit()]
    else:
        for pattern in patterns:
            if not any(fnmatchcase(unit.name, pattern) for unit in policies.units):
                raise UsageError(f"blocks: no module that can be checkpointed matches {pattern!r}")
        found = [unit for unit in policies.units if any(fnmatchcase(unit.name, pattern) for pattern in patterns)]
    found = found or policies.units
    outermost = [unit for unit in found if not any(policies.is_inside(unit, other) for other in found)]
    return sorted(outermost, key=lambda unit: unit.module)


def block_plan(policy: Policy, policies: UnitPolicies, blocks: Sequence[UnitPolicy]) -> Plan:
    """The plan of a policy that needs no budget: full, selective-N or selective-op."""
    units: tuple[Unit, ...]
    if policy.name == "selective-op":
        units = tuple(_keeping_operators(block) for block in blocks)
    else:
        interval = policy.layer_interval or 1
        units = tuple(block.recompute_all() for i, block in enumerate(blocks, 1) if i % interval == 0)
    return plan_of(policies.base, Goal(budget_bytes=1), units)


def _keeping_operators(block: UnitPolicy) -> Unit:
    """TorchTitan's selective-op: the first, third, ... matrix product, attention, and what must be kept anyway."""
    stats, problem = block.sac.stats, block.sac.problem
    products = 0
    chosen = set()
    for i, operator in enumerate(stats.operators):
        product = operator.name in ("aten.mm.default", "aten.addmm.default")
        products += product
        if operator.name in _KEPT_OPERATORS or (product and products % 2 == 1):
            chosen.add(i)
    groups = tuple(
        g
        for g, group in enumerate(stats.groups)
        if group.forced is None and any(member in chosen for member in group.members)
    )
    return block.unit(problem.solution(groups))
