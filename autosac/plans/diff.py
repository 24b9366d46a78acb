"""In what two plans differ: what they were made for, what they predict, which modules and operators they decide otherwise."""

from __future__ import annotations

from dataclasses import asdict, dataclass

from autosac.display.module_names import alike, natural, occurrences, span
from autosac.plans import Plan, Unit
from autosac.quantities import format_bytes, format_ms

UnitRow = tuple[str, str, str, tuple[str, ...], tuple[str, ...]]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanDifference:
    """`made_for` and `predictions`: name, value in A, value in B. `units`: module, what A does, what B does, and the
    operators (with their occurrence) that A keeps and B recomputes, and the other way round; `groups`: the same, for modules
    that follow each other and differ alike.
    """

    made_for: tuple[tuple[str, str, str], ...]
    predictions: tuple[tuple[str, float, float], ...]
    units: tuple[UnitRow, ...]

    def groups(self) -> list[tuple[str, str, str, str, str]]:
        """Modules (``layers.0-11``), what A does, what B does, what only A keeps, what only B keeps."""
        found = alike(self.units, lambda row: row[0], lambda row: row[1:])
        rows = []
        for members in found:
            _, a, b, only_a, only_b = members[0]
            names = span([name for name, *_ in members])
            rows.append((names, a.replace(", ", "\n"), b.replace(", ", "\n"), _short(only_a), _short(only_b)))
        return rows

    def settings(self) -> list[tuple[str, str, str]]:
        """`made_for` for people."""
        return [(_label(name), _amount(name, a), _amount(name, b)) for name, a, b in self.made_for]

    def figures(self) -> list[tuple[str, str, str, str]]:
        """`predictions` for people: name, A, B, change."""
        return [
            (name.rpartition(" ")[0], _figure(name, a), _figure(name, b), _figure(name, b - a, sign=True))
            for name, a, b in self.predictions
        ]


def compare_plans(a: Plan, b: Plan) -> PlanDifference:
    """The differences between two plans."""
    first, second = asdict(a.made_for), asdict(b.made_for)
    settings = [{**row.pop("job_settings"), **row, **asdict(plan.settings)} for row, plan in ((first, a), (second, b))]
    made_for = tuple(
        (name, *(str(found.get(name, "-")) or "-" for found in settings))
        for name in {**settings[0], **settings[1]}
        if name != "parameters" and settings[0].get(name) != settings[1].get(name)
    )
    units_a, units_b = ({unit.fqn: unit for unit in plan.units} for plan in (a, b))
    names = sorted({*units_a, *units_b}, key=natural)
    return PlanDifference(
        made_for=made_for,
        predictions=_predictions(a, b),
        units=tuple(
            _unit(name, units_a.get(name), units_b.get(name), _else(a), _else(b))
            for name in names
            if units_a.get(name) != units_b.get(name)
        ),
    )


def _predictions(a: Plan, b: Plan) -> tuple[tuple[str, float, float], ...]:
    p, q = a.predictions.get("autosac"), b.predictions.get("autosac")
    if p is None or q is None:
        return ()
    rows = [
        ("step ms", p.step_ms, q.step_ms),
        ("recompute ms", p.recompute_ms, q.recompute_ms),
        ("peak active GiB", p.peak_active_bytes / 2**30, q.peak_active_bytes / 2**30),
    ]
    if p.peak_reserved_bytes is not None and q.peak_reserved_bytes is not None:
        rows.append(("peak reserved GiB", p.peak_reserved_bytes / 2**30, q.peak_reserved_bytes / 2**30))
    return tuple(row for row in rows if row[1] != row[2])


def _else(plan: Plan) -> str:
    """What a plan does with modules that it does not name."""
    own = plan.settings.job_checkpointing
    return f"TorchTitan's own {own} checkpointing" if own else "not checkpointed"


def _unit(name: str, a: Unit | None, b: Unit | None, else_a: str, else_b: str) -> UnitRow:
    kept_a, kept_b = _kept(a), _kept(b)
    if a is None or b is None:
        return name, else_a if a is None else _does(a), else_b if b is None else _does(b), (), ()
    return name, _does(a), _does(b), tuple(sorted(kept_a - kept_b)), tuple(sorted(kept_b - kept_a))


def _does(unit: Unit) -> str:
    host = f", {format_bytes(unit.offloaded_bytes)} on the host" if unit.offloaded_bytes else ""
    if unit.memory_budget is not None:
        host += f" by a memory budget of {unit.memory_budget:g}"
    return f"keeps {format_bytes(unit.kept_bytes)}{host}, recomputes {unit.recompute_ms:.2f} ms"


def _kept(unit: Unit | None) -> set[str]:
    return (
        {f"{d.op}#{d.occurrence}{' (host)' * d.offload}" for d in unit.decisions if d.keep}
        if unit is not None
        else set()
    )


def _short(operators: tuple[str, ...]) -> str:
    return occurrences(operator.removeprefix("aten.").replace(".default", "") for operator in operators)


def _label(name: str) -> str:
    return name.removesuffix("_bytes").replace("_", " ")


def _amount(name: str, value: str) -> str:
    return format_bytes(int(value)) if name.endswith("_bytes") and value.isdecimal() else value


def _figure(name: str, value: float, *, sign: bool = False) -> str:
    text = format_ms(value) if name.endswith(" ms") else f"{value:.2f} GiB"
    return f"+{text}" if sign and value >= 0 else text
