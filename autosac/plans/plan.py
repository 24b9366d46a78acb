"""The Plan: which operators of which modules are kept and which recomputed, as plain immutable data with a
JSON form.

A plan is a list of *units*, the modules that are wrapped in activation checkpointing. Every unit carries one
`Decision` for each operator of its forward that is no view, in order, keyed by (operator, occurrence) and
with the shapes and dtypes of its outputs as a fingerprint, so that a plan can be checked against the running
model operator by operator.

The file is JSON (`save`, `load`). Units with the same decisions share one entry of its ``policies``, units
with the same parameters one entry of its ``layouts``. The classes say what a file may hold (`autosac.plans.schema`).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeAlias

from autosac.errors import PlanError
from autosac.files.documents import DATA_BYTES, read_bounded
from autosac.files.schema import STRICT, Fault
from autosac.files.writing import write_text_atomically
from autosac.plans.schema import ANY_SIZE as ANY_SIZE
from autosac.plans.schema import (
    NEWER,
    SCHEMA_VERSION,
    Change,
    Chunks,
    Count,
    Fraction,
    Milliseconds,
    Name,
    Price,
    Ranks,
    Rate,
    Size,
    check_complete,
    checked,
    damaged,
    parsed,
)
from autosac.quantities import format_bytes, format_ms

# To copy less to the host costs more than it frees on the device.
SMALLEST_OFFLOAD_BYTES = 2**16

OutputMetadata: TypeAlias = tuple[tuple[tuple[Size, ...], str], ...]
Parameters: TypeAlias = tuple[tuple[str, tuple[Count, ...]], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """Whether to keep or to recompute one operator of a unit's forward. A kept result may be offloaded to host memory.

    `op` is the overload (``"aten.mm.default"``). `occurrence` is the number of its earlier calls in this forward. `outputs`
    are the (shape, dtype) of each output tensor, with `ANY_SIZE` for dynamic sizes. The decision was based on `memory_bytes`
    (the memory that recomputing frees), `runtime_ms` (the time that recomputing takes) and `msps`, memory saved per second of
    recomputation in bytes/s (AUTO-SAC section 5.3; None if the runtime is zero).
    """

    __pydantic_config__ = STRICT

    op: Name
    occurrence: Count
    keep: bool
    outputs: OutputMetadata
    memory_bytes: Change = 0
    runtime_ms: Milliseconds = 0.0
    msps: Rate | None = None
    offload: bool = field(default=False, metadata=NEWER)


@dataclass(frozen=True, slots=True, kw_only=True)
class Unit:
    """A module that the plan checkpoints: its qualified name in the bare model, its decisions, and its parameters (name,
    global shape). `kept_bytes` is the memory that it keeps on the device; offloaded results do not count.

    If there is a `memory_budget`, the module is compiled and the compiler decides, so there are no decisions. It is the
    ``activation_memory_budget`` of PyTorch's partitioner for this module (0: recompute everything, 1: the compiler's choice).
    """

    fqn: str
    discard_fraction: float
    kept_bytes: int
    recompute_ms: float
    decisions: tuple[Decision, ...]
    parameters: Parameters = ()
    memory_budget: float | None = None

    @property
    def policy(self) -> tuple[float | None, tuple[tuple[str, int, bool, bool], ...]]:
        """The unit's decisions as plain values. Units with equal policies may share one compiled graph."""
        return self.memory_budget, tuple((d.op, d.occurrence, d.keep, d.offload) for d in self.decisions)

    @property
    def offloaded_bytes(self) -> int:
        """Bytes in host memory between the unit's forward and its backward."""
        return sum(decision.memory_bytes for decision in self.decisions if decision.offload)


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """The job's settings of checkpointing, with the names that `torch.utils.checkpoint.checkpoint` uses.

    Only compiled modules follow `early_stop`. Eager units always recompute only what is needed. All units draw the same random
    numbers again, whatever `preserve_rng_state` says.

    `loss_chunks`: the number of chunks of rows in which the loss is computed (`autosac.integrations.chunked_loss`).
    `optimizer_slice_bytes`: how much of the parameters an optimizer works on at once, 0 for all of them
    (`autosac.integrations.optimizer_slices`).
    `memory_budget`: the ``activation_memory_budget`` of PyTorch's partitioner for all compiled code (1: PyTorch's default).
    `job_checkpointing`: the way in which TorchTitan itself checkpoints the job, if that is the plan: then there are no units.
    """

    __pydantic_config__ = STRICT

    preserve_rng_state: bool = True
    early_stop: bool = True
    loss_chunks: Chunks = field(default=1, metadata=NEWER)
    optimizer_slice_bytes: Count = field(default=0, metadata=NEWER)
    memory_budget: Fraction = field(default=1.0, metadata=NEWER)
    job_checkpointing: Literal["", "full"] = field(default="", metadata=NEWER)


@dataclass(frozen=True, slots=True, kw_only=True)
class MadeFor:
    """The job, the GPU and the budget that a plan was made for.

    `budget_kind` says what the budget limits: ``"reserved"`` or ``"active"`` memory. `parameters` are all parameters of
    the model that the plan covers (name in the bare model, global shape). With `pipeline_stages` > 1 the plan
    contains the units of all stages, and a running model may be any part of it. `job_settings` are the settings of the job
    file that decide what is computed. `overrides` are the TorchTitan arguments that the job needs with this plan.
    """

    __pydantic_config__ = STRICT

    job_fingerprint: str
    model: str
    torch_version: str
    torchtitan_version: str
    gpu: str
    world_size: Ranks
    budget_bytes: Count
    budget_kind: Literal["active", "reserved"]
    pipeline_stages: Ranks = 1
    parameters: Parameters = ()
    job_settings: Mapping[str, str] = field(default_factory=dict)
    overrides: tuple[str, ...] = field(default=(), metadata=NEWER)


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """What the simulators predict for one training step under one policy.

    `recompute_ms` is the time for recomputation: in a plan, how much longer the step takes than without checkpointing.
    `peak_reserved_bytes` is None if it was not simulated.
    """

    __pydantic_config__ = STRICT

    step_ms: Milliseconds
    peak_active_bytes: Count
    peak_reserved_bytes: Count | None
    fits: bool
    recompute_ms: Milliseconds

    def compiled(self, free_ms: float) -> Prediction:
        """Of a compiled step: recomputation is a part of its backward, and so what the step takes longer than without."""
        return replace(self, recompute_ms=max(0.0, self.step_ms - free_ms))

    def peak_bytes(self, kind: str) -> int:
        """What a budget of this kind limits: the peak that is reserved, if that is asked for and known, or active."""
        reserved = self.peak_reserved_bytes if kind == "reserved" else None
        return self.peak_active_bytes if reserved is None else reserved


class Binding(NamedTuple):
    """A point of the step where memory limited the decision, and the time that one GiB more there would have saved."""

    where: str
    ms_per_gib: Price


@dataclass(frozen=True, slots=True, kw_only=True)
class Reasons:
    """The reasons for a plan, for one rank: what was minimised, by which method, and where memory limited it.

    `objective`: ``"recompute"`` (the time of recomputation) or ``"step"`` (how much longer it makes the step). `ms_per_gib`
    is the shadow price: the decrease of the objective for one GiB more of memory.
    """

    __pydantic_config__ = STRICT

    objective: Literal["recompute", "step"]
    method: str
    ms_per_gib: Milliseconds
    binding: tuple[Binding, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Certainty:
    """How certain the predictions of a plan are (`autosac.planning.confidence`).

    `confidence`: the requested probability. `margin_bytes`: the part of the budget that was left for prediction errors.
    `fits`: the probability that the plan fits the budget. The step time is between `step_low_ms` and `step_high_ms` with the
    probability `confidence`.
    """

    __pydantic_config__ = STRICT

    confidence: Fraction
    margin_bytes: Count
    fits: Fraction
    step_low_ms: Milliseconds
    step_high_ms: Milliseconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """A checkpointing plan.

    `predictions` maps the name of a policy (autosac, none, full, selective-op) to its prediction. `reasons` has one entry for
    each rank that was planned (one, or one of every pipeline stage), if a solver decided. `certainty` is set if a confidence
    was requested.

    Raises:
        PlanError: no model can follow the plan: units are nested or given twice, or decisions contradict each other.
    """

    made_for: MadeFor
    units: tuple[Unit, ...]
    settings: Settings = field(default_factory=Settings)
    predictions: Mapping[str, Prediction] = field(default_factory=dict)
    reasons: tuple[Reasons, ...] = ()
    certainty: Certainty | None = None

    def __post_init__(self) -> None:
        """Refuse what no model can obey. PlanError says what."""
        _check_units(self.units, "the plan")
        own = self.settings.job_checkpointing
        if own and (self.units or self.settings.memory_budget != 1):
            raise PlanError(
                f"the plan is TorchTitan's own {own} checkpointing, and decides on modules or memory besides"
            )

    def __str__(self) -> str:
        """What it decides, in a line."""
        made_for, predicted = self.made_for, self.predictions.get("autosac")
        text = f"plan for {made_for.model} on {made_for.world_size} x {made_for.gpu}: {self.doing}"
        if predicted is None:
            return text
        reserved = predicted.peak_reserved_bytes
        peak = (
            f"{format_bytes(predicted.peak_active_bytes)} active"
            if reserved is None
            else f"{format_bytes(reserved)} reserved"
        )
        return f"{text}, step time {format_ms(predicted.step_ms)}, peak {peak}"

    def to_bytes(self) -> bytes:
        """The plan as the JSON text that `save` writes."""
        return (_layout(_encode(self)) + "\n").encode()

    def save(self, path: str | Path) -> None:
        """Write the plan as JSON. The file is written completely or not at all.

        Raises:
            OSError: the file cannot be written.
        """
        write_text_atomically(Path(path), self.to_bytes().decode())

    @staticmethod
    def load(path: str | Path) -> Plan:
        """Read a plan file.

        Raises:
            PlanError: the file cannot be read, is not a plan, is truncated or damaged, or has another schema version.
        """
        try:
            content = read_bounded(path, DATA_BYTES)
        except OSError as e:
            raise PlanError(f"cannot read the plan {path}: {e.strerror}") from e
        return Plan.from_bytes(content, name=str(path))

    @staticmethod
    def from_bytes(content: bytes, name: str = "the plan") -> Plan:
        """The plan whose JSON text is `content`.

        Args:
            content: what `save` has written.
            name: what errors call it.

        Raises:
            PlanError: as `load`.
        """
        document = parsed(content, name)
        file = checked(content, _File, name)
        _check_complete(document, name)
        return file.plan(name)

    @property
    def doing(self) -> str:
        """How it checkpoints, in a few words."""
        own, budget = self.settings.job_checkpointing, self.settings.memory_budget
        slices = self.settings.optimizer_slice_bytes
        sliced = f", the optimizer in slices of {format_bytes(slices)}" if slices else ""
        if budget != 1 and not self.units:
            return f"a memory budget of {budget:g} for all that is compiled{sliced}"
        checkpointed = f"TorchTitan's own {own} checkpointing" if own else f"{len(self.units)} modules checkpointed"
        return checkpointed + sliced

    @property
    def graphs(self) -> int:
        """The number of distinct policies: a compiled job has so many graphs for each kind of module."""
        return len({unit.policy for unit in self.units})

    @property
    def needs_compiler(self) -> bool:
        """Whether the plan leaves decisions to the compiler's partitioner."""
        return self.settings.memory_budget != 1 or any(unit.memory_budget is not None for unit in self.units)

    @property
    def offloads(self) -> bool:
        """Whether the plan offloads a result to host memory."""
        return any(decision.offload for unit in self.units for decision in unit.decisions)

    def hash(self) -> str:
        """The SHA-256, in hexadecimal, of the plan's canonical JSON (sorted keys, no spaces)."""
        text = json.dumps(_encode(self), sort_keys=True, separators=(",", ":"), allow_nan=False)
        return hashlib.sha256(text.encode()).hexdigest()


# ---- JSON --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class _UnitRow:
    """A unit in a file: `policy` and `layout` are positions in the file's tables of decisions and of parameters."""

    __pydantic_config__ = STRICT

    fqn: str
    discard_fraction: Fraction
    kept_bytes: Count
    recompute_ms: Milliseconds
    policy: Count
    layout: Count
    memory_budget: Fraction | None = field(default=None, metadata=NEWER)


@dataclass(frozen=True, slots=True, kw_only=True)
class _File:
    """A plan file."""

    __pydantic_config__ = STRICT

    format: Literal["autosac-plan"]
    schema: Literal[1]
    made_for: MadeFor
    settings: Settings
    predictions: dict[str, Prediction]
    units: tuple[_UnitRow, ...]
    layouts: tuple[Parameters, ...]
    policies: tuple[tuple[Decision, ...], ...]
    reasons: tuple[Reasons, ...] = field(default=(), metadata=NEWER)
    certainty: Certainty | None = field(default=None, metadata=NEWER)

    def plan(self, name: str) -> Plan:
        """The plan. PlanError if a unit refers to what is not there, or operators are numbered wrongly."""
        self._check_numbering(name)
        return Plan(
            made_for=self.made_for,
            units=tuple(self._unit(i, row, name) for i, row in enumerate(self.units)),
            settings=self.settings,
            predictions=self.predictions,
            reasons=self.reasons,
            certainty=self.certainty,
        )

    def _unit(self, i: int, row: _UnitRow, name: str) -> Unit:
        for reference, position, table in (("policy", row.policy, self.policies), ("layout", row.layout, self.layouts)):
            if position >= len(table):
                how = f"there is no {reference} {position}"
                raise damaged(name, Fault(("units", i, reference), position, how, "together"))
        return Unit(
            fqn=row.fqn,
            discard_fraction=row.discard_fraction,
            kept_bytes=row.kept_bytes,
            recompute_ms=row.recompute_ms,
            decisions=self.policies[row.policy],
            parameters=self.layouts[row.layout],
            memory_budget=row.memory_budget,
        )

    def _check_numbering(self, name: str) -> None:
        for i, policy in enumerate(self.policies):
            seen: dict[str, int] = {}
            for j, row in enumerate(policy):
                due = seen.get(row.op, 0)
                if row.occurrence != due:
                    message = f"occurrence {row.occurrence} of {row.op} where {due} is due"
                    raise damaged(name, Fault(("policies", i, j), row, message, "together"))
                seen[row.op] = due + 1


def _check_complete(document: dict[str, Any], name: str) -> None:
    """PlanError if something that has a default in its class is not in the file (what has none has been checked)."""
    check_complete(document["made_for"], MadeFor, ("made_for",), name)
    check_complete(document["settings"], Settings, ("settings",), name)
    for i, row in enumerate(document.get("reasons", ())):
        check_complete(row, Reasons, ("reasons", i), name)
    for i, policy in enumerate(document["policies"]):
        for j, row in enumerate(policy):
            check_complete(row, Decision, ("policies", i, j), name)


def _encode(plan: Plan) -> dict[str, Any]:
    policies: dict[tuple[Decision, ...], int] = {}
    layouts: dict[Parameters, int] = {}
    units = []
    for unit in plan.units:
        units.append(
            {
                "fqn": unit.fqn,
                "discard_fraction": unit.discard_fraction,
                "kept_bytes": unit.kept_bytes,
                "recompute_ms": unit.recompute_ms,
                "policy": policies.setdefault(unit.decisions, len(policies)),
                "layout": layouts.setdefault(unit.parameters, len(layouts)),
                **({} if unit.memory_budget is None else {"memory_budget": unit.memory_budget}),
            }
        )
    return {
        "format": "autosac-plan",
        "schema": SCHEMA_VERSION,
        "made_for": asdict(plan.made_for),
        "settings": _settings_row(plan.settings),
        "predictions": {name: asdict(prediction) for name, prediction in plan.predictions.items()},
        "reasons": [{**asdict(r), "binding": [list(point) for point in r.binding]} for r in plan.reasons],
        "certainty": None if plan.certainty is None else asdict(plan.certainty),
        "units": units,
        "layouts": [list(layout) for layout in layouts],
        "policies": [[_row(decision) for decision in policy] for policy in policies],
    }


def _settings_row(settings: Settings) -> dict[str, Any]:
    row = asdict(settings)
    for each in fields(settings):
        if (
            each.metadata.get("newer") and row[each.name] == each.default
        ):  # as in plans of versions that did not know it
            del row[each.name]
    return row


def _row(decision: Decision) -> dict[str, Any]:
    row = asdict(decision)
    if not decision.offload:  # as in plans of versions that did not know it
        del row["offload"]
    return row


def _layout(value: Any, depth: int = 0) -> str:
    """JSON with one line per entry, down to one line for each decision, unit and parameter."""
    inline = json.dumps(value, allow_nan=False)
    if depth == 3 or not isinstance(value, dict | list | tuple) or len(inline) + depth <= 110:
        return inline
    indent, end = " " * (depth + 1), " " * depth
    if isinstance(value, dict):
        rows = [f"{json.dumps(key)}: {_layout(item, depth + 1)}" for key, item in value.items()]
        return "{\n" + ",\n".join(indent + row for row in rows) + f"\n{end}}}"
    return "[\n" + ",\n".join(indent + _layout(item, depth + 1) for item in value) + f"\n{end}]"


# ---- checks ------------------------------------------------------------------------------------------------


def _check_units(units: tuple[Unit, ...], name: str) -> None:
    names: set[str] = set()
    for unit in units:
        if not unit.fqn:
            raise PlanError(f"{name} checkpoints the whole model as one unit: choose modules inside it")
        if unit.fqn in names:
            raise PlanError(f"{name} names the unit {unit.fqn} twice")
        names.add(unit.fqn)
        if unit.memory_budget is not None and unit.decisions:
            raise PlanError(f"{name} has decisions for {unit.fqn} and leaves it to the compiler with a memory budget")
        for decision in unit.decisions:
            if decision.offload and not decision.keep:
                raise PlanError(f"{name} offloads {decision.op} of {unit.fqn}, which it does not keep")
    for fqn in names:
        parts = fqn.split(".")
        for i in range(1, len(parts)):
            if ".".join(parts[:i]) in names:
                raise PlanError(f"{name} nests the unit {fqn} in the unit {'.'.join(parts[:i])}")
