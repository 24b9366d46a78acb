"""A unit's decisions, made ready for looking up while the unit runs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from autosac.integrations.operators.facts import Facts
from autosac.integrations.operators.keys import output_metadata
from autosac.integrations.recompute.entries import observer
from autosac.plans import ANY_SIZE, Decision, OutputMetadata, Unit


class PlanMismatchWarning(UserWarning):
    """A checkpointed module does not do what its plan says: what the plan does not know is recomputed, which costs time."""


class UnitDecisions:
    """A unit's decisions, shared by all executions of the module."""

    def __init__(self, unit: Unit) -> None:
        self.fqn = unit.fqn
        self.size = len(unit.decisions)
        self.waits = sum("wait_tensor" in decision.op for decision in unit.decisions)
        self.keeps = any(decision.keep for decision in unit.decisions)
        self._by_name: dict[str, list[Decision]] = {}
        for decision in unit.decisions:
            self._by_name.setdefault(decision.op, []).append(decision)
        self._by_facts: dict[Facts, list[Decision]] = {}
        self._warned = False
        self.sets_switches = False  # the module, inside its forward (`flags`)

    def decisions(self, facts: Facts) -> list[Decision]:
        """The decisions about this operator, by occurrence."""
        rows = self._by_facts.get(facts)
        if rows is None:
            rows = self._by_facts[facts] = self._by_name.get(facts.name, [])
        return rows

    def decides_on_numbers(self, facts: Facts) -> bool:
        """Whether some call of this operator, as the plan has it, returns single numbers."""
        return any(row.outputs and not any(shape for shape, _ in row.outputs) for row in self.decisions(facts))

    def decision(self, facts: Facts, occurrence: int, out: Any) -> Decision | None:
        """The decision about this call; None, with a warning, if the plan knows of none.

        Results of another shape or type are kept as planned, with a warning, but do not leave the device: ranks whose batches
        differ must still recompute the same collectives.
        """
        rows = self.decisions(facts)
        if occurrence >= len(rows):
            if facts.is_wait:  # it may come after the unit: what is communicated is waited for where it is used
                return None
            self.warn(f"runs more calls of {facts.name} than the plan's {len(rows)}")
            return None
        planned, found = rows[occurrence].outputs, output_metadata(out)
        if found != planned and not _alike(found, planned):
            self.warn(
                f"{facts.name} (call {occurrence}) returns {_words(found)}; the plan has {_words(planned)}",
                "it takes other memory than the plan says",
            )
            return replace(rows[occurrence], offload=False)
        return rows[occurrence]

    def warn(self, reason: str, consequence: str = "recomputing what the plan does not know") -> None:
        """Say that the module does not follow its plan, and what is done about it: to the user once."""
        is_first, self._warned = not self._warned, True
        text = f"module {self.fqn} {reason}: {consequence} (gradients stay correct; reported once)"
        observer[0].mismatch(PlanMismatchWarning(text), is_first)


def _alike(found: OutputMetadata, planned: OutputMetadata) -> bool:
    """Whether they agree wherever the plan has no dynamic size."""
    return len(found) == len(planned) and all(
        dtype == planned_dtype
        and len(shape) == len(planned_shape)
        and all(size == wanted or wanted == ANY_SIZE for size, wanted in zip(shape, planned_shape, strict=True))
        for (shape, dtype), (planned_shape, planned_dtype) in zip(found, planned, strict=True)
    )


def _words(outputs: OutputMetadata) -> str:
    return ", ".join(f"{dtype}{list(shape)}" for shape, dtype in outputs) or "no tensor"
