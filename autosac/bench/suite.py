"""Suites: what is to be compared, from a TOML file.

    name = "My models"
    gpu = "h100-sxm-80gb"
    budgets = ["68GiB"]
    policies = ["none", "full", "selective-2", "selective-op", "knapsack"]

    [[models]]                                  # an eager model
    name = "mine"
    make_step = "my_model.py:make_step"         # or "package.module:make_step"; see autosac.api for what it returns
    blocks = ["layers.*"]                       # what "full" checkpoints (default: members of numbered containers)
    [[models.configurations]]
    name = "C1"
    batch_size = 8                              # every other key is an argument of make_step

    [[models]]                                  # a TorchTitan job
    name = "llama3 8B"
    job = "llama3_8b.toml"                      # relative to this file; with TorchTitan 0.3 "llama3:llama3_8b"
    world_size = 8
    [[models.configurations]]
    name = "8k"
    "training.seq_len" = 8192                   # every other key is a TorchTitan argument

Paths are relative to the suite. Optional: ``budget_kind`` ("reserved" or "active"), ``alloc_conf``, ``milp`` ("cbc" or
"highs"), ``time_limit_s``, ``gap``, ``utilisation``, and a ``[case_study]`` (`CaseStudy`).
"""

from __future__ import annotations

import importlib
import importlib.util
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from autosac.bench.policies import JOINT, Policy
from autosac.choices import SOLVERS
from autosac.errors import UsageError
from autosac.files.documents import TEXT_BYTES, DocumentError, parse_toml, read_bounded
from autosac.limits import MOST_BUDGETS, MOST_GPUS
from autosac.planning.planner import Goal
from autosac.quantities import parse_budget
from autosac.simulation import Target
from autosac.solvers import BACKENDS
from autosac.solvers.backend import make_backend

Value = str | int | float | bool
Named = TypeVar("Named", "Model", "Configuration")


@dataclass(frozen=True, slots=True, kw_only=True)
class Configuration:
    """One setting of a model: arguments of make_step, or TorchTitan's."""

    name: str
    arguments: tuple[tuple[str, Value], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """An eager model (`make_step`) or a TorchTitan job (`job`), in several configurations."""

    name: str
    configurations: tuple[Configuration, ...]
    make_step: str = ""
    job: str = ""
    world_size: int = 1
    blocks: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if bool(self.make_step) == bool(self.job):
            raise UsageError(f"model {self.name!r}: give make_step or job (one of them)")
        if self.make_step and not all(self.make_step.rpartition(":")[::2]):
            raise UsageError(f"model {self.name!r}: make_step {self.make_step!r} is not of the form module:function")
        if not self.configurations:
            raise UsageError(f"model {self.name!r} has no configurations")
        _check_distinct([c.name for c in self.configurations], f"configuration of {self.name}")
        if self.world_size < 1:
            raise UsageError(f"model {self.name!r}: the world size must be at least 1")
        if self.make_step and self.world_size > 1:
            raise UsageError(f"model {self.name!r}: an eager model runs on one GPU")


@dataclass(frozen=True, slots=True, kw_only=True)
class CaseStudy:
    """One configuration in depth (AUTO-SAC 5.6.5 and 5.6.6): plans for several budgets, the curve of one module."""

    model: str
    configuration: str
    module: str
    budgets: tuple[str, ...]
    solver: str = "ilp"


@dataclass(frozen=True, kw_only=True)
class Suite:
    """What is to be compared. `folder`: where paths are relative to. `use_cache`: captures may be those of
    earlier runs.
    """

    name: str
    models: tuple[Model, ...]
    budgets: tuple[str, ...]
    policies: tuple[Policy, ...]
    gpu: str = "h100-sxm-80gb"
    budget_kind: str = "reserved"
    alloc_conf: str | None = None
    milp: str = "cbc"
    time_limit_s: float = 30.0
    gap: float = 5e-3
    utilisation: float = 0.98
    case_study: CaseStudy | None = None
    folder: Path = field(default=Path())
    use_cache: bool = True

    def __post_init__(self) -> None:
        if not self.models:
            raise UsageError(f"the suite {self.name!r} has no models")
        if len(self.budgets) > MOST_BUDGETS:
            raise UsageError(f"the suite {self.name!r} has {len(self.budgets)} budgets, of at most {MOST_BUDGETS}")
        if not self.policies:
            raise UsageError(f"the suite {self.name!r} has no policies")
        if not self.budgets:
            raise UsageError(f"the suite {self.name!r} has no budget")
        _check_distinct([model.name for model in self.models], "model")
        _check_distinct([policy.name for policy in self.policies], "policy")
        if self.milp not in BACKENDS:
            raise UsageError(f"unknown MILP solver {self.milp!r}: choose one of {', '.join(BACKENDS)}")
        if not 0 < self.utilisation <= 1:
            raise UsageError(f"utilisation {self.utilisation}: it must be more than 0 and at most 1")
        self.budgets_bytes()
        self.goal(1)
        if any(policy.planned for policy in self.policies):
            make_backend(self.milp)
        for model in self.models:
            theirs = [p.name for p in self.policies if p.memory_budget is not None or p.stops_early]
            if model.make_step and theirs:
                raise UsageError(f"the policy {theirs[0]} is for TorchTitan jobs; {model.name!r} is an eager model")
        if self.case_study is not None:
            self.find(self.case_study.model, self.case_study.configuration)
            self._bytes(self.case_study.budgets)
            if self.case_study.solver not in (*SOLVERS, JOINT):
                raise UsageError(f"case_study.solver {self.case_study.solver!r}: expected one of {', '.join(SOLVERS)}")
            if not self.case_study.budgets:
                raise UsageError("case_study.budgets names no budget")

    @property
    def target(self) -> Target:
        """The machine of eager models. HardwareError for an unknown GPU."""
        return Target.of(self.gpu, 1, allocator=self.alloc_conf or "")

    def budgets_bytes(self) -> tuple[int, ...]:
        """The budgets. UsageError if one is given twice."""
        return self._bytes(self.budgets)

    def case_budgets_bytes(self) -> tuple[int, ...]:
        """The case study's budgets."""
        return self._bytes(self.case_study.budgets) if self.case_study else ()

    def _bytes(self, budgets: Sequence[str]) -> tuple[int, ...]:
        found = tuple(parse_budget(text, self.target.hardware.usable_bytes) for text in budgets)
        for i, text in enumerate(budgets):
            if found[i] in found[:i]:
                raise UsageError(f"the budget {text} is given twice")
        return found

    def goal(self, budget_bytes: int, solver: str = "pareto") -> Goal:
        """The planning goal of one budget."""
        return Goal(
            budget_bytes=budget_bytes,
            budget_kind=self.budget_kind,
            solver=solver,
            milp=self.milp,
            time_limit_s=self.time_limit_s,
            gap=self.gap,
            utilisation=self.utilisation,
        )

    def find(self, model: str, configuration: str) -> tuple[Model, Configuration]:
        """A model and its configuration by their names. UsageError for unknown ones."""
        _check_known([model], [m.name for m in self.models], "model")
        found = next(m for m in self.models if m.name == model)
        _check_known([configuration], [c.name for c in found.configurations], f"configuration of {model}")
        return found, next(c for c in found.configurations if c.name == configuration)

    def pick(self, models: Sequence[str] = (), configurations: Sequence[str] = ()) -> Suite:
        """The suite cut down to some models and configurations (all where none are named). UsageError for unknown names."""
        kept = [model for model in self.models if not models or model.name in models]
        _check_known(models, [model.name for model in self.models], "model")
        names = {c.name for model in kept for c in model.configurations}
        _check_known(configurations, sorted(names), "configuration")
        cut = []
        for model in kept:
            wanted = tuple(c for c in model.configurations if not configurations or c.name in configurations)
            if wanted:
                cut.append(replace(model, configurations=wanted))
        case = self.case_study
        left = {(model.name, c.name) for model in cut for c in model.configurations}
        keep_case = case is not None and (case.model, case.configuration) in left
        return replace(self, models=tuple(cut), case_study=case if keep_case else None)


def load_suite(path: str | Path) -> Suite:
    """Read a suite file. UsageError, on one line, for what is wrong with it."""
    path = Path(path)
    try:
        document = parse_toml(read_bounded(path, TEXT_BYTES))
    except OSError as e:
        raise UsageError(f"suite {path}: {e.strerror or e}") from e
    except DocumentError as e:
        raise UsageError(f"suite {path} is not valid TOML: {e}") from e
    try:
        return _suite(document, path)
    except UsageError as e:
        raise UsageError(f"suite {path}: {e}") from e


def _suite(document: dict[str, Any], path: Path) -> Suite:
    _check_keys(document, Suite, without=("folder",))
    settings = dict(document)
    settings.setdefault("name", path.stem)
    settings["models"] = tuple(_model(table) for table in _tables(settings.get("models", []), "models"))
    settings["budgets"] = _texts(settings.get("budgets", ["85%"]), "budgets")
    settings["policies"] = tuple(Policy(name) for name in _texts(settings.get("policies", []), "policies"))
    case = settings.pop("case_study", None)
    if case is not None:
        (case,) = _tables([case], "case_study")
        _check_keys(case, CaseStudy)
        _check_required(case, ("model", "configuration", "module", "budgets"), "case_study")
        _check_names(case, ("model", "configuration", "module", "solver"), "case_study.")
        case = CaseStudy(**{**case, "budgets": _texts(case["budgets"], "case_study.budgets")})
    for key in ("time_limit_s", "gap", "utilisation"):
        if key in settings and (isinstance(settings[key], bool) or not isinstance(settings[key], int | float)):
            raise UsageError(f"{key} is not a number: {settings[key]!r}")
    _check_names(settings, ("name", "gpu", "budget_kind", "milp"))
    if not isinstance(settings.get("alloc_conf", ""), str):
        raise UsageError(f"alloc_conf is {settings['alloc_conf']!r}: expected a text")
    return Suite(**settings, case_study=case, folder=path.resolve().parent)


def _model(table: dict[str, Any]) -> Model:
    _check_keys(table, Model)
    _check_required(table, ("name",), "a model")
    _check_names(table, ("name", "make_step", "job"), "a model's ")
    rows = _tables(table.get("configurations", []), "configurations")
    for row in rows:
        _check_required(row, ("name",), f"a configuration of {table['name']}")
        _check_names(row, ("name",), f"a configuration of {table['name']}: ")
        for key, value in row.items():
            if not isinstance(value, Value) or (isinstance(value, float) and not math.isfinite(value)):
                raise UsageError(f"configuration {row['name']} of {table['name']}: {key} is not a plain value")
            if not table.get("job") and not key.isidentifier():
                raise UsageError(
                    f"configuration {row['name']} of {table['name']}: {key!r} is not the name of an argument"
                )
    configurations = tuple(
        Configuration(name=row["name"], arguments=tuple((k, v) for k, v in row.items() if k != "name")) for row in rows
    )
    size = table.get("world_size", 1)
    if type(size) is not int or not 1 <= size <= MOST_GPUS:
        raise UsageError(
            f"model {table['name']}: world_size is {size!r}: expected a whole number from 1 to {MOST_GPUS}"
        )
    return Model(**{**table, "configurations": configurations, "blocks": _texts(table.get("blocks", []), "blocks")})


def _tables(value: Any, name: str) -> list[dict[str, Any]]:
    if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
        raise UsageError(f"{name} must be tables")
    return value


def _texts(value: Any, name: str) -> tuple[str, ...]:
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise UsageError(f"{name} must be a list of texts")
    return tuple(value)


def _check_names(table: Mapping[str, Any], keys: Sequence[str], where: str = "") -> None:
    """UsageError unless those of the keys that are there hold text, on one line and not empty."""
    for key in keys:
        value = table.get(key, "x")
        if not isinstance(value, str) or not value.strip() or not value.isprintable():
            raise UsageError(f"{where}{key} is {value!r}: expected a non-empty text on one line")


def _check_keys(table: Mapping[str, Any], kind: type, without: Sequence[str] = ()) -> None:
    known = [f.name for f in fields(kind) if f.name not in without]
    for key in table:
        if key not in known:
            raise UsageError(f"unknown key {key!r}: expected {', '.join(known)}")


def _check_required(table: Mapping[str, Any], names: Sequence[str], where: str) -> None:
    for name in names:
        if name not in table:
            raise UsageError(f"{where} has no {name}")


def _check_known(names: Sequence[str], known: Sequence[str], what: str) -> None:
    for name in names:
        if name not in known:
            raise UsageError(f"no {what} {name!r}: the suite has {', '.join(known)}")


def _check_distinct(names: Sequence[str], what: str) -> None:
    for i, name in enumerate(names):
        if name in names[:i]:
            raise UsageError(f"the {what} {name!r} is given twice")


def make_step_of(folder: Path, make_step: str, arguments: Mapping[str, Value]) -> Callable[..., Any]:
    """The function named "module:function", with these arguments; a file is relative to `folder`. UsageError."""
    place, _, name = make_step.rpartition(":")
    try:
        module = _import_file(folder / place) if place.endswith(".py") else importlib.import_module(place)
        function = getattr(module, name)
    except (Exception, SystemExit) as e:  # it is the user's own code, which may raise anything
        raise UsageError(f"{make_step} cannot be imported: {type(e).__name__}: {' '.join(str(e).split())}") from e
    if not callable(function):
        raise UsageError(f"{make_step} is not a function that makes a step")
    return partial(function, **arguments)


def _import_file(path: Path) -> Any:
    """Import a file under a name of its own, once."""
    name = f"autosac_bench_{path.stem}_{abs(hash(path)):x}"
    if name in sys.modules:
        return sys.modules[name]
    specification = importlib.util.spec_from_file_location(name, path)
    if specification is None or specification.loader is None:
        raise ImportError(f"{path} is not a Python file")
    module = importlib.util.module_from_spec(specification)
    sys.modules[name] = module
    try:
        specification.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module
