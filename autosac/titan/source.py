"""What the installed TorchTitan 0.2 says of its settings and models, read from its source without importing it.

Importing TorchTitan takes seconds, for it imports PyTorch; the dataclasses of its settings and the tables of its models are
plain literals that `ast` understands. What is written otherwise is not known here.
"""

from __future__ import annotations

import ast
import importlib.util
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple


class Field(NamedTuple):
    """A setting: its type as written (``"str | None"``) and its default (`UNKNOWN` if that is no literal)."""

    type: str
    default: Any


UNKNOWN = object()
Section = Mapping[str, "Field | Mapping[str, Field]"]


@lru_cache(maxsize=4)
def dataclasses_of(path: Path) -> dict[str, dict[str, Field]]:
    """The dataclasses in a source file, by name: their fields. Empty if the file cannot be read."""
    tree = _parsed(path)
    if tree is None:
        return {}
    return {
        node.name: {
            item.target.id: Field(ast.unparse(item.annotation), _literal(item.value))
            for item in node.body
            if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name)
        }
        for node in tree.body
        if isinstance(node, ast.ClassDef)
    }


def sections() -> dict[str, dict[str, Field]]:
    """The settings of a job file by section, that of AutoSAC's plugin with them. Empty if TorchTitan is not as expected."""
    root = _torchtitan()
    classes = dict(dataclasses_of(root / "config" / "job_config.py")) if root is not None else {}
    if "JobConfig" not in classes:
        return {}
    found = {name: classes[field.type] for name, field in classes["JobConfig"].items() if field.type in classes}
    plugin = dataclasses_of(Path(__file__).resolve().parents[1] / "integrations" / "torchtitan" / "job_config.py")
    if "AutoSAC" in plugin:
        found["autosac"] = plugin["AutoSAC"]
    return found


def nested(type_name: str) -> dict[str, Field] | None:
    """The fields of a dataclass among TorchTitan's settings; None if the type is none."""
    root = _torchtitan()
    return dataclasses_of(root / "config" / "job_config.py").get(type_name) if root is not None else None


def model_facts(name: str, flavor: str) -> dict[str, int]:
    """n_layers, n_heads, n_kv_heads, n_experts and top_k (experts of a token, at least) of a model that comes with TorchTitan,
    as far as its source says them.
    """
    root = _torchtitan()
    if root is None or not name.isidentifier():
        return {}
    folder = root / "models" / name
    call = _flavor(folder / "__init__.py", flavor)
    if call is None or not isinstance(call.func, ast.Name):
        return {}
    fields = dataclasses_of(folder / "model" / "args.py").get(call.func.id, {})
    facts: dict[str, int] = {}
    given = {keyword.arg: _literal(keyword.value) for keyword in call.keywords}
    for fact in ("n_layers", "n_heads", "n_kv_heads"):
        value = given.get(fact, fields[fact].default if fact in fields else UNKNOWN)
        if fact == "n_kv_heads" and value is None:
            value = facts.get("n_heads", UNKNOWN)
        if type(value) is int:
            facts[fact] = value
    return facts | _experts(root, call, fields)


def _experts(root: Path, call: ast.Call, fields: Mapping[str, Field]) -> dict[str, int]:
    """n_experts and top_k of a mixture of experts: what a flavor says, else the defaults of ``MoEArgs``."""
    of = {keyword.arg: keyword.value for keyword in call.keywords}
    enabled = (
        _literal(of["moe_enabled"]) if "moe_enabled" in of else getattr(fields.get("moe_enabled"), "default", True)
    )
    said = of.get("moe_args")
    if enabled is not True or "moe_args" not in fields or (said is not None and not isinstance(said, ast.Call)):
        return {}
    usual = dataclasses_of(root / "models" / "moe" / "moe.py").get(fields["moe_args"].type, {})
    values = {name: field.default for name, field in usual.items()}
    values |= {inner.arg: _literal(inner.value) for inner in said.keywords if inner.arg} if said is not None else {}
    experts, chosen = values.get("num_experts"), values.get("top_k")
    return {"n_experts": experts, "top_k": chosen if type(chosen) is int else 1} if type(experts) is int else {}


def models() -> frozenset[str] | None:
    """The models that come with TorchTitan; None if its source does not say them."""
    root = _torchtitan()
    found: set[str] = set()
    for folder, table in (("models", "_supported_models"), ("experiments", "_supported_experiments")):
        tree = _parsed(root / folder / "__init__.py") if root is not None else None
        value = _assigned(tree, table)
        names = _literal(value.args[0]) if isinstance(value, ast.Call) and len(value.args) == 1 else UNKNOWN
        if not isinstance(names, list):
            return None
        found.update(map(str, names))
    return frozenset(found)


def flavors(name: str) -> tuple[str, ...] | None:
    """The flavors of a model that comes with TorchTitan; None if its source does not say all of them."""
    root = _torchtitan()
    tree = _parsed(root / "models" / name / "__init__.py") if root is not None and name.isidentifier() else None
    nodes = list(ast.walk(tree)) if tree is not None else []
    tables = [node.value for node in nodes if isinstance(node, ast.keyword) and node.arg == "model_args"]
    if len(tables) != 1 or not isinstance(tables[0], ast.Name):
        return None
    table = tables[0].id
    uses = [node for node in nodes if isinstance(node, ast.Name) and node.id == table]
    value = _assigned(tree, table)
    if len(uses) != 2 or not isinstance(value, ast.Dict):  # more uses may add flavors
        return None
    keys = [_literal(key) for key in value.keys]
    return tuple(map(str, keys)) if all(isinstance(key, str) for key in keys) else None


@lru_cache(maxsize=1)
def converters() -> frozenset[str]:
    """The model converters (float8 and others) that come with TorchTitan. Empty if its source does not say them."""
    root = _torchtitan()
    files = sorted((root / "components").rglob("*.py")) if root is not None else []
    calls = [
        node
        for tree in map(_parsed, files)
        for node in (ast.walk(tree) if tree is not None else ())
        if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("register_model_converter")
    ]
    names = [_literal(call.args[1]) if len(call.args) == 2 else UNKNOWN for call in calls]
    return frozenset(map(str, names)) if all(isinstance(name, str) for name in names) else frozenset()


def has_pipelines(name: str) -> bool:
    """Whether a model that comes with TorchTitan can be cut into pipeline stages, as far as its source tells it."""
    root = _torchtitan()
    tree = _parsed(root / "models" / name / "__init__.py") if root is not None and name.isidentifier() else None
    functions = [
        keyword.value
        for node in (ast.walk(tree) if tree is not None else ())
        if isinstance(node, ast.Call)
        for keyword in node.keywords
        if keyword.arg == "pipelining_fn"
    ]
    return not functions or any(_literal(function) is not None for function in functions)


def _flavor(path: Path, flavor: str) -> ast.Call | None:
    """The call that makes a flavor's arguments in the table of a model's package."""
    tree = _parsed(path)
    for node in ast.walk(tree) if tree is not None else ():
        if isinstance(node, ast.Dict):
            for key, value in zip(node.keys, node.values, strict=True):
                if isinstance(key, ast.Constant) and key.value == flavor and isinstance(value, ast.Call):
                    return value
    return None


def _assigned(tree: ast.Module | None, name: str) -> ast.expr | None:
    """What a module assigns to a name of its own, once."""
    for node in tree.body if tree is not None else ():
        if isinstance(node, ast.Assign) and [ast.unparse(target) for target in node.targets] == [name]:
            return node.value
    return None


def _parsed(path: Path) -> ast.Module | None:
    try:
        return ast.parse(path.read_text(encoding="utf-8"))
    except (OSError, SyntaxError, ValueError):
        return None


def _torchtitan() -> Path | None:
    specification = importlib.util.find_spec("torchtitan")
    if specification is None or specification.origin is None:
        return None
    return Path(specification.origin).parent


def _literal(node: ast.expr | None) -> Any:
    if node is None:
        return UNKNOWN
    try:
        return ast.literal_eval(node)
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return UNKNOWN
