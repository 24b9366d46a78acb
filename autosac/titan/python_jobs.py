"""What a TorchTitan 0.3 job, a Python configuration, says of itself.

Reading one means importing TorchTitan and PyTorch, which takes seconds: `read_python_job` does it in a process of its own,
which runs this module and prints what it found as JSON.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import importlib
import inspect
import io
import json
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from autosac.errors import UsageError
from autosac.titan.version import split_python_job

_SECTIONS = ("training", "parallelism", "compile")
_PLAIN = (bool, int, float, str, type(None))
_ADDRESS = re.compile(r" at 0x[0-9a-f]+")


@dataclass(frozen=True, kw_only=True)
class PythonJob:
    """A configuration as its function and the arguments make it.

    `settings`: training, parallelism, compilation and optimizer, by their names; `facts`: n_layers, n_heads, n_kv_heads,
    n_experts; `given`: what the arguments set; `checkpointing`: what policies of checkpointing have in common. `module` and
    `function`: where the function is. `pipelines`: whether the installed torch can run its pipelines. `digest`: of all of it.
    """

    module: str
    function: str
    settings: Mapping[str, Any]
    facts: Mapping[str, int]
    given: Mapping[str, Any]
    checkpointing: Mapping[str, Any]
    pipelines: bool
    digest: str


def read_python_job(job: str, overrides: Sequence[str]) -> PythonJob:
    """The configuration MODULE:CONFIG with these arguments. UsageError for what TorchTitan rejects."""
    split_python_job(job)
    words = [sys.executable, "-P", "-m", __name__, job, *overrides]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    try:
        answer = json.loads(done.stdout.splitlines()[-1])
    except (IndexError, ValueError):
        said = (done.stderr.strip().splitlines() or ["it ended without a message"])[-1]
        raise UsageError(f"{job} cannot be read: {said}") from None
    if "refused" in answer:
        raise UsageError(f"TorchTitan rejects the job: {answer['refused']}")
    return PythonJob(**answer)


def plain_text(message: str) -> str:
    """A message that TorchTitan's argument parser has drawn in a box, on one line."""
    words = [word for word in message.split() if any(map(str.isalnum, word))]
    return re.split(r" (?:For full|Argument) helptext", " ".join(words))[0][:300]


def _read(job: str, overrides: Sequence[str]) -> dict[str, Any]:
    from torch.distributed.pipelining.schedules import PipelineScheduleSingle
    from torchtitan.config import ConfigManager
    from torchtitan.distributed.activation_checkpoint import ActivationCheckpointing

    module, name = split_python_job(job)
    manager = ConfigManager()
    config = manager.parse_args(["--module", module, "--config", name, *overrides])
    if getattr(config, "model_spec", None) is None:
        raise ValueError(f"{job} gives a {type(config).__qualname__} without a model to train")
    policy = config.activation_checkpoint
    common = [field.name for field in dataclasses.fields(ActivationCheckpointing.Config)] if policy is not None else []
    settings = {
        f"{section}.{field.name}": value
        for section in _SECTIONS
        for field in dataclasses.fields(getattr(config, section))
        if isinstance(value := getattr(getattr(config, section), field.name), _PLAIN)
    }
    settings["optimizer.implementation"] = config.optimizer.implementation
    settings["optimizer.name"] = ",".join(sorted({group.optimizer_name for group in config.optimizer.param_groups}))
    content = _ADDRESS.sub("", json.dumps(config.to_dict(), sort_keys=True, default=str))
    function = _function(manager, module, name)
    return {
        "module": function.__module__,
        "function": function.__qualname__,
        "settings": settings,
        "facts": _facts(config.model_spec.model),
        "given": _given(config, overrides),
        "checkpointing": {field: getattr(policy, field) for field in common},
        "pipelines": "arg_mbs" in inspect.signature(PipelineScheduleSingle.step).parameters,
        "digest": hashlib.sha256(content.encode()).hexdigest()[:16],
    }


def _function(manager: Any, module: str, name: str) -> Any:
    """The job's function."""
    for place in _places(module):
        with contextlib.suppress(ImportError):
            found = getattr(importlib.import_module(place), name, None)
            if found is not None:
                return found
    raise ValueError(f"{module} has no {name}")


def _places(module: str) -> tuple[str, ...]:
    """Where TorchTitan looks for a job's function: among its own models and experiments, then as a module's path says."""
    return (
        f"torchtitan.models.{module}.config_registry",
        f"torchtitan.experiments.{module}.config_registry",
        f"{module}.config_registry",
        module,
    )


def missing_package(module: str) -> str:
    """What a job's module imports and nobody has installed, with the words around it; empty if there is no such thing.

    TorchTitan says only that it cannot import the module.
    """
    for place in _places(module):
        try:
            importlib.import_module(place)
        except ModuleNotFoundError as e:
            if e.name and not f"{place}.".startswith(f"{e.name}."):
                return f": {e.name} is not installed"
        except ImportError as e:
            return f": {' '.join(str(e).split())[:200]}"
    return ""


def _facts(model: Any) -> dict[str, int]:
    layers = list(getattr(model, "layers", None) or ())
    found = {"n_layers": len(layers)}
    names = {"n_heads": "n_heads", "n_kv_heads": "n_kv_heads", "n_experts": "num_experts", "top_k": "top_k"}
    for fact, name in names.items():
        values = {value for layer in layers for value in _values(layer, name)}
        if values:
            found[fact] = min(values)
    return found


def _values(config: Any, name: str) -> list[int]:
    """The whole numbers of this name in a tree of dataclasses."""
    found: list[int] = []
    for field in dataclasses.fields(config):
        value = getattr(config, field.name, None)
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            found += _values(value, name)
        elif field.name == name and type(value) is int and value > 0:
            found.append(value)
    return found


def _given(config: Any, overrides: Sequence[str]) -> dict[str, Any]:
    """The values of what the arguments name. ValueError for what cannot be written as a literal."""
    found: dict[str, Any] = {}
    for word in overrides:
        if not word.startswith("--"):
            continue
        *path, last = word[2:].partition("=")[0].replace("-", "_").split(".")
        owner = config
        for part in path:
            owner = getattr(owner, part, None)
        name = last if hasattr(owner, last) else last.removeprefix("no_")
        value = getattr(owner, name, owner)
        if json.loads(json.dumps(value, default=str)) != value:
            raise ValueError(f"{word} cannot be written into a configuration: set it in the job's function")
        found[".".join((*path, name))] = value
    return found


def main(words: Sequence[str]) -> None:
    """Print what a job says, as one line of JSON."""
    said = io.StringIO()
    try:
        with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
            answer = _read(words[0], words[1:])
    except SystemExit:
        answer = {"refused": plain_text(said.getvalue())}
    except (ValueError, TypeError, ImportError, AttributeError) as e:
        why = missing_package(split_python_job(words[0])[0]) if isinstance(e, ImportError) else ""
        answer = {"refused": " ".join(str(e).split())[:300] + why}
    print(json.dumps(answer))


if __name__ == "__main__":
    main(sys.argv[1:])
