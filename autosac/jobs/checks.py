"""Checks of a TorchTitan 0.2 job before anything is captured: what its file and arguments say, by the names of the settings.

TorchTitan checks little of a job file's types and tells of impossible settings by assertions deep inside, seconds later.
Checked here: that the file is TOML and says something, that its settings and those of arguments exist, that the file's have
the right types, that numbers are within their ranges, that the degrees of parallelism fill the world, and that sequence,
batch, heads and layers can be divided as the degrees ask for. What shows only when the job runs is left to TorchTitan.
"""

from __future__ import annotations

import ast
import difflib
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from autosac.display.printable import printable
from autosac.errors import UsageError
from autosac.files.documents import TEXT_BYTES, DocumentError, parse_toml, read_bounded
from autosac.limits import MOST_BATCH, MOST_GPUS, parse_whole
from autosac.titan import source as titan_source
from autosac.titan.source import UNKNOWN, Field

_DEGREES = {
    "data_parallel_replicate_degree": "data_parallel_replicate",
    "data_parallel_shard_degree": "data_parallel_shard",
    "context_parallel_degree": "context_parallel",
    "tensor_parallel_degree": "tensor_parallel",
    "pipeline_parallel_degree": "pipeline_parallel",
}
_MOST_TOKENS = 2**28
# Setting -> (least, most, a value that stands for "automatic" or None)
_RANGES: dict[str, tuple[int, int, int | None]] = {
    "training.local_batch_size": (1, MOST_BATCH, None),
    "training.global_batch_size": (1, 2**40, -1),
    "training.seq_len": (1, _MOST_TOKENS, None),
    "training.steps": (1, 2**62, None),
    **{f"parallelism.{name}": (1, MOST_GPUS, -1 if "shard" in name else None) for name in _DEGREES},
    "parallelism.expert_parallel_degree": (1, MOST_GPUS, None),
    "parallelism.expert_tensor_parallel_degree": (1, MOST_GPUS, None),
    "parallelism.pipeline_parallel_microbatch_size": (1, MOST_BATCH, None),
    "parallelism.pipeline_parallel_layers_per_stage": (1, 2**20, None),
    "parallelism.pipeline_parallel_first_stage_less_layers": (0, 2**20, None),
    "parallelism.pipeline_parallel_last_stage_less_layers": (0, 2**20, None),
}
_DIVIDED = ("llama3", "llama4", "deepseek_v3", "qwen3", "gpt_oss")  # whose sequence and heads are divided
_NO_MODELS = (UNKNOWN, None, "", "autosac.integrations.torchtitan")  # custom imports that register none
_ONE_STAGE = ("1F1B", "GPipe")  # schedules with one stage on each rank


def check_job_file(path: str, overrides: Sequence[str], world_size: int) -> None:
    """UsageError, which names the file or the setting, its value and what is allowed, if the job cannot run."""
    document = _document(path, overrides)
    known = titan_source.sections()
    if not known:
        return
    own = _own_settings(document, overrides)
    _check_types(document, known, path, own)
    if not own:
        _check_arguments(overrides, known)
    settings = _Settings(document, known, overrides, path)
    if not own and settings.text("experimental.custom_import") in _NO_MODELS:
        _check_model(settings)
    settings.check_ranges()
    _check_degrees(settings, world_size)
    _check_division(settings, world_size)
    _check_pipeline(settings)
    _check_offload(settings, world_size)


def _document(path: str, overrides: Sequence[str]) -> dict[str, Any]:
    """What a job file says. UsageError if it cannot be read, or the job says nothing at all."""
    try:
        document = parse_toml(read_bounded(path, TEXT_BYTES))
    except OSError as e:
        raise UsageError(f"job file {path}: {e.strerror or e}") from e
    except DocumentError as e:
        raise UsageError(f"job file {path} is not valid TOML: {e}") from e
    if not document and not overrides:
        raise UsageError(f"job file {path} is empty: it needs at least a section [model] with name and flavor")
    return document


def read_setting(path: str, overrides: Sequence[str]) -> Callable[[str], Any]:
    """A function that says what a job has for a setting ("training.seq_len"), as it is written: in the arguments, the file, or
    TorchTitan's defaults; None if nobody says. UsageError if the file cannot be read.
    """
    settings = _Settings(_document(path, overrides), titan_source.sections(), overrides, path)

    def read(name: str) -> Any:
        value = settings.text(name)
        return None if value is UNKNOWN else value

    return read


def _check_arguments(overrides: Sequence[str], known: Mapping[str, Mapping[str, Field]]) -> None:
    """UsageError for the first argument that names no setting, or is none. What is written otherwise is left to TorchTitan."""
    expected: float = 0  # values of the option before
    for word in overrides:
        if not word.startswith("--"):
            if expected < 1:
                raise UsageError(f"argument {printable(word)}: expected --section.setting, or a value behind one")
            expected -= 1
            continue
        option, equals, _ = word.partition("=")
        section, dot, key = option.removeprefix("--").replace("-", "_").partition(".")
        if not dot or "." in key:
            expected = math.inf
            continue
        if section not in known:
            raise UsageError(f"argument {printable(word)}: there is no section {section}; it may be {', '.join(known)}")
        if not {key, key.removeprefix("no_")} & known[section].keys():
            near = [f"--{section}.{name}" for name in difflib.get_close_matches(key, known[section], n=3)]
            hint = f"perhaps {' or '.join(near)}" if near else f"[{section}] has {', '.join(known[section])}"
            raise UsageError(f"argument {printable(word)}: there is no such setting; {hint}")
        expected = 0 if equals else _values_behind(known[section].get(key))


def _values_behind(field: Field | None) -> float:
    """How many values follow an option on the command line. A switch (None: with "no") has none."""
    if field is None or field.type == "bool":
        return 0
    return 1 if field.type.removesuffix(" | None") in ("int", "float", "str", "list[str]") else math.inf


def _check_model(settings: _Settings) -> None:
    """UsageError for a model or a flavor that TorchTitan does not have, of a job that brings none of its own."""
    name, flavor = str(settings.text("model.name")), str(settings.text("model.flavor"))
    there = titan_source.models()
    if there is not None and name not in there:
        raise UsageError(f"unknown model {printable(name)!r}; TorchTitan has: {', '.join(sorted(there))}")
    flavors = titan_source.flavors(name)
    if flavors is not None and flavor not in flavors:
        raise UsageError(f"unknown flavor {printable(flavor)!r} of {name}; it has: {', '.join(flavors)}")
    chosen = settings.text("model.converters")
    chosen = chosen.split(",") if isinstance(chosen, str) else chosen
    for converter in chosen if isinstance(chosen, list) else ():
        if titan_source.converters() and converter not in titan_source.converters():
            raise UsageError(
                f"model.converters: unknown converter {printable(str(converter))!r}; TorchTitan has: "
                f"{', '.join(sorted(titan_source.converters()))}"
            )


def _own_settings(document: Mapping[str, Any], overrides: Sequence[str]) -> bool:
    """Whether the job brings settings of its own, which are not known here."""
    job, experimental = document.get("job"), document.get("experimental")
    named = [
        job.get("custom_config_module") if isinstance(job, dict) else None,
        experimental.get("custom_args_module") if isinstance(experimental, dict) else None,
    ]
    options = [word.partition("=")[0].replace("-", "_") for word in overrides]
    return any(name and name != "autosac.integrations.torchtitan.job_config" for name in named) or any(
        option.endswith(("custom_config_module", "custom_args_module")) for option in options
    )


# ---- types ---------------------------------------------------------------------------------------------------


def _check_types(document: Mapping[str, Any], known: Mapping[str, Mapping[str, Field]], path: str, own: bool) -> None:
    for section, table in document.items():
        if section not in known:
            if own:
                continue
            raise UsageError(
                f"job file {path}: there is no section [{printable(section)}]; it may have {', '.join(known)}"
            )
        if not isinstance(table, dict):
            raise UsageError(f"job file {path}: {section} is {_shown(table)}: expected a section [{section}]")
        _check_section(f"{section}", table, known[section], path, own)


def _check_section(name: str, table: Mapping[str, Any], fields: Mapping[str, Field], path: str, own: bool) -> None:
    for key, value in table.items():
        field = fields.get(key)
        if field is None:
            if own:
                continue
            raise UsageError(
                f"job file {path}: there is no setting {name}.{printable(key)}; [{name}] has {', '.join(fields)}"
            )
        inner = titan_source.nested(field.type)
        if inner is not None:
            if not isinstance(value, dict):
                raise UsageError(f"job file {path}: {name}.{key} is {_shown(value)}: expected a section [{name}.{key}]")
            _check_section(f"{name}.{key}", value, inner, path, own)
            continue
        allowed = _allowed(ast.parse(field.type, mode="eval").body)
        if allowed is not None and not any(_is(value, one) for one in allowed):
            raise UsageError(f"job file {path}: {name}.{key} is {_shown(value)}: expected {_described(allowed)}")


def _allowed(node: ast.expr) -> list[ast.expr] | None:
    """The alternatives of a type; None if it is not one of those that are checked."""
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitOr):
        left, right = _allowed(node.left), _allowed(node.right)
        return [*left, *right] if left is not None and right is not None else None
    if isinstance(node, ast.Constant) and node.value is None:
        return [node]
    if isinstance(node, ast.Name) and node.id in _PLAIN:
        return [node]
    if isinstance(node, ast.Subscript) and isinstance(node.value, ast.Name) and node.value.id in ("list", "Literal"):
        return [node]
    return None


_PLAIN: dict[str, tuple[tuple[type, ...], str]] = {
    "int": ((int,), "a whole number"),
    "float": ((int, float), "a number"),
    "bool": ((bool,), "true or false"),
    "str": ((str,), "a text"),
}


def _is(value: Any, kind: ast.expr) -> bool:
    if isinstance(kind, ast.Name):
        finite = not isinstance(value, float) or math.isfinite(value)
        return type(value) in _PLAIN[kind.id][0] and finite
    if isinstance(kind, ast.Subscript):
        if isinstance(kind.value, ast.Name) and kind.value.id == "Literal":
            return type(value) is str and value in _choices(kind)
        inner = _allowed(kind.slice)
        return isinstance(value, list) and (inner is None or all(any(_is(v, one) for one in inner) for v in value))
    return False  # None: TOML has no such value


def _choices(kind: ast.Subscript) -> tuple[str, ...]:
    choices = ast.literal_eval(kind.slice)
    return choices if isinstance(choices, tuple) else (choices,)


def _described(allowed: Sequence[ast.expr]) -> str:
    texts = []
    for kind in allowed:
        if isinstance(kind, ast.Name):
            texts.append(_PLAIN[kind.id][1])
        elif isinstance(kind, ast.Subscript):
            literal = isinstance(kind.value, ast.Name) and kind.value.id == "Literal"
            texts.append(" or ".join(map(repr, _choices(kind))) if literal else "a list")
    return " or ".join(dict.fromkeys(texts))


def _shown(value: Any) -> str:
    try:
        text = printable(repr(value))
    except ValueError:
        text = "a number with thousands of digits"
    return text if len(text) <= 60 else text[:57] + "..."


# ---- values --------------------------------------------------------------------------------------------------


class _Settings:
    """The settings that are checked: those of the arguments, else of the file, else TorchTitan's defaults."""

    def __init__(
        self,
        document: Mapping[str, Any],
        known: Mapping[str, Mapping[str, Field]],
        overrides: Sequence[str],
        path: str,
    ) -> None:
        self._document, self._known, self._path = document, known, path
        self._given = given_settings(overrides)

    def text(self, name: str) -> Any:
        """The value as it is written; `UNKNOWN` if nobody says."""
        section, key = name.split(".")
        if name in self._given:
            return self._given[name]
        table = self._document.get(section, {})
        if key in table:
            return table[key]
        field = self._known.get(section, {}).get(key)
        return UNKNOWN if field is None else field.default

    def number(self, name: str) -> int | None:
        """A whole number; None if nobody says one."""
        value = self.text(name)
        if isinstance(value, str):
            digits = value.removeprefix("-")
            whole = parse_whole(digits, 0, 2**62)
            return None if whole is None else (-whole if value.startswith("-") else whole)
        return value if type(value) is int else None

    def said(self, name: str) -> str:
        """The setting and its value, as a message begins."""
        where = "" if name in self._given else f"job file {self._path}: "
        value = self.text(name)
        return f"{where}{name} is {value if isinstance(value, int) else _shown(value)}"

    def check_ranges(self) -> None:
        """UsageError for the first number that is out of its range."""
        for name, (least, most, automatic) in _RANGES.items():
            value = self.text(name)
            if value is UNKNOWN or value is None or (name in self._given and value in ("None", "none")):
                continue
            number = self.number(name)
            if number is None or not (least <= number <= most or number == automatic):
                also = f", or {automatic} (automatic)" if automatic is not None else ""
                raise UsageError(f"{self.said(name)}: expected a whole number from {least} to {most}{also}")


def given_settings(overrides: Sequence[str]) -> dict[str, str]:
    """The values of arguments of the form ``--section.name value``, ``--section.name=value``, and of switches
    (``--section.name``, ``--section.no-name``: "True", "False"), by the names of the settings; the last one of each.
    """
    found: dict[str, str] = {}
    for i, word in enumerate(overrides):
        option, equals, value = word.partition("=")
        if not option.startswith("--") or option.count(".") != 1:
            continue
        name = option[2:].replace("-", "_")
        if equals:
            found[name] = value
        elif i + 1 < len(overrides) and not overrides[i + 1].startswith("--"):
            found[name] = overrides[i + 1]
        else:
            section, _, key = name.partition(".")
            found[f"{section}.{key.removeprefix('no_')}"] = str(not key.startswith("no_"))
    return found


def _degrees(settings: _Settings) -> dict[str, int]:
    return {name: settings.number(f"parallelism.{name}") or 1 for name in _DEGREES}


def _check_degrees(settings: _Settings, world_size: int) -> None:
    degrees = _degrees(settings)
    automatic = degrees["data_parallel_shard_degree"] == -1
    used = math.prod(degree for degree in degrees.values() if degree != -1)
    listed = " x ".join(f"{_DEGREES[name]} {degree}" for name, degree in degrees.items() if degree not in (-1, 1))
    if automatic and world_size % used:
        largest = max((name for name in degrees if degrees[name] != -1), key=lambda name: degrees[name])
        raise UsageError(
            f"{settings.said(f'parallelism.{largest}')}: {listed} must divide the world of {world_size} GPUs (--world-size)"
        )
    if not automatic and used != world_size:
        raise UsageError(
            f"parallelism: the degrees ({listed or 'all 1'}) multiply to {used}, but the world has {world_size} GPUs "
            "(--world-size): they must be equal, or data_parallel_shard_degree be -1"
        )
    _check_experts(settings, degrees, world_size)


def _fsdp_shards(degrees: Mapping[str, int], world_size: int) -> int:
    return world_size // math.prod(degrees[name] for name in _DEGREES if name != "data_parallel_shard_degree")


def _check_experts(settings: _Settings, degrees: Mapping[str, int], world_size: int) -> None:
    """Experts are spread over GPUs of FSDP, context and tensor parallelism; the last with whole experts only."""
    experts = settings.number("parallelism.expert_parallel_degree") or 1
    within = settings.number("parallelism.expert_tensor_parallel_degree") or 1
    tensor, context = degrees["tensor_parallel_degree"], degrees["context_parallel_degree"]
    if experts == 1:
        return
    if within not in (1, tensor):
        raise UsageError(
            f"{settings.said('parallelism.expert_tensor_parallel_degree')}: expected 1, or "
            f"{tensor} as parallelism.tensor_parallel_degree is"
        )
    shards = _fsdp_shards(degrees, world_size)
    spread = shards * context * (tensor if within == 1 else 1)
    if spread % experts:
        counted = f"FSDP {shards} x context_parallel {context}" + f" x tensor_parallel {tensor}" * (within == 1)
        raise UsageError(
            f"{settings.said('parallelism.expert_parallel_degree')}: expected a divisor of {spread} ({counted}): "
            f"{_divisors(spread)}"
        )
    name, flavor = settings.text("model.name"), settings.text("model.flavor")
    held = titan_source.model_facts(str(name), str(flavor)).get("n_experts", experts)
    if held % experts:
        raise UsageError(
            f"{settings.said('parallelism.expert_parallel_degree')}: {name} {flavor} has {held} experts in a layer, "
            f"which can be divided by {_divisors(held)}"
        )


def _check_division(settings: _Settings, world_size: int) -> None:
    degrees = _degrees(settings)
    tensor, context = degrees["tensor_parallel_degree"], degrees["context_parallel_degree"]
    batches = world_size // (tensor * context * degrees["pipeline_parallel_degree"])
    local, whole = settings.number("training.local_batch_size"), settings.number("training.global_batch_size")
    if local and whole is not None and whole > 0 and whole % (local * batches):
        raise UsageError(
            f"{settings.said('training.global_batch_size')}: expected a multiple of training.local_batch_size times the "
            f"data-parallel ranks ({local} x {batches} = {local * batches})"
        )
    name, flavor = settings.text("model.name"), settings.text("model.flavor")
    if name not in _DIVIDED:
        return
    length = settings.number("training.seq_len")
    if length is not None and length % (tensor * 2 * context):
        raise UsageError(
            f"{settings.said('training.seq_len')}: expected a multiple of {tensor * 2 * context} "
            f"(tensor_parallel {tensor} x 2 x context_parallel {context})"
        )
    facts = titan_source.model_facts(str(name), str(flavor))
    for fact, what in (("n_heads", "attention heads"), ("n_kv_heads", "key and value heads")):
        if fact in facts and facts[fact] % tensor:
            raise UsageError(
                f"{settings.said('parallelism.tensor_parallel_degree')}: {name} {flavor} has {facts[fact]} {what}, "
                f"which can be divided by {_divisors(facts[fact])}"
            )


def _divisors(number: int) -> str:
    found = [d for d in range(1, number + 1) if number % d == 0]
    return ", ".join(map(str, found))


def _check_pipeline(settings: _Settings) -> None:
    stages = _degrees(settings)["pipeline_parallel_degree"]
    if stages == 1:
        return
    size, batch = (
        settings.number(f) for f in ("parallelism.pipeline_parallel_microbatch_size", "training.local_batch_size")
    )
    if size and batch and batch % size:
        raise UsageError(
            f"{settings.said('parallelism.pipeline_parallel_microbatch_size')}: expected a divisor of "
            f"training.local_batch_size = {batch}"
        )
    facts = titan_source.model_facts(str(settings.text("model.name")), str(settings.text("model.flavor")))
    layered = settings.text("parallelism.pipeline_parallel_layers_per_stage")
    parts = settings.text("parallelism.module_fqns_per_model_part")
    if "n_layers" not in facts or layered is not None or parts is not None:
        return
    first, last = (
        settings.number(f"parallelism.pipeline_parallel_{end}_stage_less_layers") or 0 for end in ("first", "last")
    )
    each = 1 if settings.text("parallelism.pipeline_parallel_schedule") in _ONE_STAGE else 2
    most = (facts["n_layers"] + first + last) // max(1, first, last) // each
    if stages > most:
        raise UsageError(
            f"{settings.said('parallelism.pipeline_parallel_degree')}: {settings.text('model.name')} "
            f"{settings.text('model.flavor')} has {facts['n_layers']} layers, enough for at most {most} ranks with {each} "
            f"stage{'s' * (each > 1)} each (schedule {_shown(settings.text('parallelism.pipeline_parallel_schedule'))})"
        )


def _check_offload(settings: _Settings, world_size: int) -> None:
    """Without FSDP TorchTitan leaves the parameters on the host and computes with them and the GPU's batch: PyTorch fails."""
    degrees = _degrees(settings)
    offloads = str(settings.text("training.enable_cpu_offload")).lower() == "true"
    if (
        offloads
        and settings.text("model.name") in _DIVIDED
        and _fsdp_shards(degrees, world_size) * degrees["context_parallel_degree"] == 1
    ):
        raise UsageError(
            f"{settings.said('training.enable_cpu_offload')}: it is FSDP that offloads, and here it has one GPU: expected "
            "parallelism.data_parallel_shard_degree or context_parallel_degree above 1"
        )
