"""The plan file's JSON Schema, and the checks of a file that claims to be a plan (see `autosac.plans`)."""

from __future__ import annotations

from typing import Any

from autosac.display.printable import printable
from autosac.errors import PlanError
from autosac.files.documents import DocumentError, parse_json

SCHEMA_VERSION = 1
# In a fingerprint: a size that depends on data (the tokens that are routed to an expert) and may be any.
ANY_SIZE = -1


def checked_document(content: bytes, name: str) -> dict[str, Any]:
    """The document in a plan file's bytes; errors call it `name`. PlanError if it is no plan that can be read."""
    document = _parse(content, name)
    _check_version(document, name)
    _check_schema(document, name)
    _check_sense(document, name)
    return document


def _object(properties: dict[str, Any]) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


_MOST = 2**62
_COUNT = {"type": "integer", "minimum": 0, "maximum": _MOST}
_RANKS = {"type": "integer", "minimum": 1, "maximum": 2**17}
_MS = {"type": "number", "minimum": 0, "maximum": 1e15}
_NAMED_SHAPES = {
    "type": "array",
    "items": {
        "type": "array",
        "prefixItems": [{"type": "string"}, {"type": "array", "items": _COUNT}],
        "minItems": 2,
        "maxItems": 2,
    },
}
_OUTPUTS = {
    "type": "array",
    "items": {
        "type": "array",
        "prefixItems": [
            {"type": "array", "items": {"type": "integer", "minimum": ANY_SIZE, "maximum": _MOST}},
            {"type": "string"},
        ],
        "minItems": 2,
        "maxItems": 2,
    },
}

_REASONS = {
    "type": "array",
    "items": _object(
        {
            "objective": {"enum": ["recompute", "step"]},
            "method": {"type": "string"},
            "ms_per_gib": _MS,
            "binding": {
                "type": "array",
                "items": {
                    "type": "array",
                    "prefixItems": [{"type": "string"}, {"type": "number", "minimum": -1e15, "maximum": 1e15}],
                    "minItems": 2,
                    "maxItems": 2,
                },
            },
        }
    ),
}

_PROBABILITY = {"type": "number", "minimum": 0, "maximum": 1}
_CERTAINTY = _object(
    {"confidence": _PROBABILITY, "margin_bytes": _COUNT, "fits": _PROBABILITY, "step_low_ms": _MS, "step_high_ms": _MS}
)

SCHEMA: dict[str, Any] = {
    "$schema": "https://json-schema.org/draft/2020-12/schema",
    **_object(
        {
            "format": {"const": "autosac-plan"},
            "schema": {"const": SCHEMA_VERSION},
            "made_for": _object(
                {
                    "job_fingerprint": {"type": "string"},
                    "model": {"type": "string"},
                    "torch_version": {"type": "string"},
                    "torchtitan_version": {"type": "string"},
                    "gpu": {"type": "string"},
                    "world_size": _RANKS,
                    "budget_bytes": _COUNT,
                    "budget_kind": {"enum": ["active", "reserved"]},
                    "pipeline_stages": _RANKS,
                    "parameters": _NAMED_SHAPES,
                    "job_settings": {"type": "object", "additionalProperties": {"type": "string"}},
                }
            ),
            "settings": _object({"preserve_rng_state": {"type": "boolean"}, "early_stop": {"type": "boolean"}}),
            "predictions": {
                "type": "object",
                "additionalProperties": _object(
                    {
                        "step_ms": _MS,
                        "peak_active_bytes": _COUNT,
                        "peak_reserved_bytes": {"type": ["integer", "null"], "minimum": 0, "maximum": _MOST},
                        "fits": {"type": "boolean"},
                        "recompute_ms": _MS,
                    }
                ),
            },
            "units": {
                "type": "array",
                "items": _object(
                    {
                        "fqn": {"type": "string"},
                        "discard_fraction": {"type": "number", "minimum": 0, "maximum": 1},
                        "kept_bytes": _COUNT,
                        "recompute_ms": _MS,
                        "policy": _COUNT,
                        "layout": _COUNT,
                    }
                ),
            },
            "layouts": {"type": "array", "items": _NAMED_SHAPES},
            "policies": {
                "type": "array",
                "items": {
                    "type": "array",
                    "items": _object(
                        {
                            "op": {"type": "string", "minLength": 1},
                            "occurrence": _COUNT,
                            "keep": {"type": "boolean"},
                            "outputs": _OUTPUTS,
                            "memory_bytes": {"type": "integer", "minimum": -_MOST, "maximum": _MOST},
                            "runtime_ms": _MS,
                            "msps": {"type": ["number", "null"], "minimum": -1e30, "maximum": 1e30},
                        }
                    ),
                },
            },
        }
    ),
}
# Not required: plans of earlier versions have none.
SCHEMA["properties"]["reasons"] = _REASONS
SCHEMA["properties"]["certainty"] = {"anyOf": [{"type": "null"}, _CERTAINTY]}
SCHEMA["properties"]["made_for"]["properties"]["overrides"] = {"type": "array", "items": {"type": "string"}}
SCHEMA["properties"]["policies"]["items"]["items"]["properties"]["offload"] = {"type": "boolean"}


def _parse(content: bytes, name: str) -> dict[str, Any]:
    try:
        document = parse_json(content)
    except DocumentError as e:
        looks_like_plan = content.lstrip().startswith(b"{") and b"autosac-plan" in content[:200]
        what = "is truncated or damaged" if looks_like_plan else "is not an AutoSAC plan"
        raise PlanError(f"{name} {what}: {_short(str(e))}") from e
    if not isinstance(document, dict) or document.get("format") != "autosac-plan":
        raise PlanError(f"{name} is not an AutoSAC plan")
    return document


def _check_version(document: dict[str, Any], name: str) -> None:
    if document.get("schema") != SCHEMA_VERSION or isinstance(document.get("schema"), bool):
        raise PlanError(
            f"{name} has plan schema {_short(str(document.get('schema')))}; this version of AutoSAC reads "
            f"{SCHEMA_VERSION}: make the plan again"
        )


def _check_schema(document: dict[str, Any], name: str) -> None:
    from jsonschema import Draft202012Validator, validators

    def whole(_: Any, value: Any) -> bool:  # in a JSON Schema 1.0 is an integer, too
        return type(value) is int

    types = Draft202012Validator.TYPE_CHECKER.redefine("integer", whole)
    strict = validators.extend(Draft202012Validator, type_checker=types)
    error = next(iter(strict(SCHEMA).iter_errors(document)), None)
    if error is not None:
        raise PlanError(f"{name} is damaged at {printable(error.json_path)}: {_short(error.message)}")


def _check_sense(document: dict[str, Any], name: str) -> None:
    """What the schema cannot say of a file: references and the numbering of occurrences."""
    for i, row in enumerate(document["units"]):
        for reference, table in (("policy", "policies"), ("layout", "layouts")):
            if row[reference] >= len(document[table]):
                raise PlanError(
                    f"{name} is damaged at $.units[{i}].{reference}: there is no {reference} {row[reference]}"
                )
    for i, policy in enumerate(document["policies"]):
        seen: dict[str, int] = {}
        for j, row in enumerate(policy):
            if row["occurrence"] != seen.get(row["op"], 0):
                raise PlanError(
                    f"{name} is damaged at $.policies[{i}][{j}]: occurrence {row['occurrence']} of "
                    f"{row['op']} where {seen.get(row['op'], 0)} is due"
                )
            seen[row["op"]] = row["occurrence"] + 1


def _short(message: str, limit: int = 160) -> str:
    line = printable(" ".join(message.split()))
    return line if len(line) <= limit else line[: limit - 3] + "..."
