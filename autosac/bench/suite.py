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
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any, ClassVar, TypeVar

from autosac.bench.policies import JOINT, Policy
from autosac.choices import SOLVERS
from autosac.errors import UsageError
from autosac.files.documents import TEXT_BYTES, DocumentError, parse_toml, read_bounded
from autosac.files.schema import STRICT, Checked, Fault, Name, Within, Words, fitted
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


def _configuration(table: Any) -> Configuration | None:
    """The configuration in a table: its name, and arguments under all other keys."""
    if not isinstance(table, dict) or not all(_is_plain(value) for value in table.values()):
        return None
    name = table.get("name")
    if not isinstance(name, str) or not name.strip() or not name.isprintable():
        return None
    return Configuration(name=name, arguments=tuple((key, value) for key, value in table.items() if key != "name"))


def _is_plain(value: Any) -> bool:
    return isinstance(value, Value) and not (isinstance(value, float) and not math.isfinite(value))


def _policy(name: Any) -> Policy | None:
    return Policy(name) if isinstance(name, str) else None


InFile = Annotated[Configuration, Checked(_configuration, "a table with a name, and plain values under all other keys")]


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """An eager model (`make_step`) or a TorchTitan job (`job`), in several configurations."""

    __pydantic_config__: ClassVar[Any] = STRICT

    name: Name
    configurations: tuple[InFile, ...] = ()
    make_step: Annotated[str, Words(empty=True)] = ""
    job: Annotated[str, Words(empty=True)] = ""
    world_size: Annotated[int, Within(1, MOST_GPUS)] = 1
    blocks: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if bool(self.make_step) == bool(self.job):
            raise UsageError(f"model {self.name!r}: give make_step or job (one of them)")
        if self.make_step and not all(self.make_step.rpartition(":")[::2]):
            raise UsageError(f"model {self.name!r}: make_step {self.make_step!r} is not of the form module:function")
        if not self.configurations:
            raise UsageError(f"model {self.name!r} has no configurations")
        _check_distinct([c.name for c in self.configurations], f"configuration of {self.name}")
        if self.make_step and self.world_size > 1:
            raise UsageError(f"model {self.name!r}: an eager model runs on one GPU")
        for configuration in self.configurations if self.make_step else ():
            for key, _ in configuration.arguments:
                if not key.isidentifier():
                    raise UsageError(f"configuration {configuration.name}: {key!r} is not the name of an argument")


@dataclass(frozen=True, slots=True, kw_only=True)
class CaseStudy:
    """One configuration in depth (AUTO-SAC 5.6.5 and 5.6.6): plans for several budgets, the curve of one module."""

    __pydantic_config__: ClassVar[Any] = STRICT

    model: Name
    configuration: Name
    module: Name
    budgets: tuple[str, ...]
    solver: Name = "ilp"


@dataclass(frozen=True, kw_only=True)
class Suite:
    """What is to be compared. `folder`: where paths are relative to. `use_cache`: captures may be those of
    earlier runs.
    """

    __pydantic_config__: ClassVar[Any] = STRICT

    name: Name
    models: tuple[Model, ...] = ()
    budgets: tuple[str, ...] = ("85%",)
    policies: tuple[Annotated[Policy, Checked(_policy, "the name of a policy")], ...] = ()
    gpu: Name = "h100-sxm-80gb"
    budget_kind: Name = "reserved"
    alloc_conf: str | None = None
    milp: Name = "cbc"
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
    if "folder" in document:
        raise UsageError(f"suite {path}: folder is not a known key")
    found = fitted({"name": path.stem, **document, "folder": str(path.resolve().parent)}, Suite)
    if isinstance(found, Fault):
        raise UsageError(f"suite {path}: {found.text}")
    return found


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
