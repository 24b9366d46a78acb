"""Expectations in files: ``AUTOSAC_UPDATE_GOLDEN=1`` writes them anew; look at what changed before committing.

Test modules import this as ``pinned`` (see `pythonpath` in pyproject.toml).
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def check(path: Path, text: str) -> None:
    """Compare with a file, line by line (blanks at the ends of lines do not count)."""
    lines = [line.rstrip() for line in text.splitlines()]
    if os.environ.get("AUTOSAC_UPDATE_GOLDEN") == "1":
        path.write_text("\n".join(lines) + "\n")
    assert lines == path.read_text().splitlines()


def lines_of(document: Mapping[str, Any]) -> str:
    """A document with six digits of each number, one line for each member of its lists and tables."""

    def told(name: str, value: Any) -> list[str]:
        if isinstance(value, list | Mapping) and len(json.dumps(value)) > 160:
            items = value.items() if isinstance(value, Mapping) else enumerate(value)
            return [line for key, of in items for line in told(f"{name}.{key}", of)]
        return [f"{name}: {json.dumps(value, default=str)}"]

    return "\n".join(line for key, value in rounded(document).items() for line in told(key, value))


def rounded(value: Any) -> Any:
    """A document with six digits of each number: times go through exp and log, whose last digits differ between processors."""
    if isinstance(value, float):
        return float(f"{value:.6g}")
    if isinstance(value, Mapping):
        return {str(key): rounded(v) for key, v in value.items()}
    return [rounded(v) for v in value] if isinstance(value, list | tuple) else value


def digest(document: Any) -> str:
    """How long a document is, and its hash."""
    text = json.dumps(rounded(document), default=str, sort_keys=True)
    return f"{len(text)} {hashlib.sha256(text.encode()).hexdigest()[:16]}"
