"""What a calibration has measured so far, kept beside its output so that a second start goes on where the first ended.

JSON lines: first ``{"format", "machine"}``, then one line an operator when it is begun (``{"begun": key}``) and one when it is
done (``{"key", "ms", "rel_std"}`` or ``{"key", "skipped": why}``). Every line is on the disk before the work goes on. A line
that was cut off is dropped. An operator that was begun and never done ended the process; it is not tried again. Of an operator
that was measured several times the mean counts.
"""

from __future__ import annotations

import json
import math
import os
from collections import Counter
from pathlib import Path
from types import TracebackType
from typing import Any

from autosac.errors import UsageError

_FORMAT = "autosac-calibration-journal-1"


class Journal:
    """An open journal: `done`, `times` (how often it was measured) and `skipped` by the operator's key. Use it as a context
    manager.
    """

    def __init__(self, path: Path, machine: dict[str, Any], *, resume: bool) -> None:
        """Open or begin it. UsageError if one is there that `resume` does not ask for, or that is of another machine."""
        self.path = path
        self.done: dict[str, tuple[float, float]] = {}
        self.times: Counter[str] = Counter()
        self.skipped: dict[str, str] = {}
        lines = _read(path) if path.exists() else []
        if lines and not resume:
            raise UsageError(
                f"{path} is left from an unfinished calibration: give --resume to continue it, or delete it"
            )
        if lines:
            self._take(lines, machine)
        self._file = path.open("a" if lines else "w", encoding="utf-8")
        if lines:
            self._file.write("\n")  # should the last line have been cut off
        else:
            self._append({"format": _FORMAT, "machine": machine})

    def _take(self, lines: list[dict[str, Any]], machine: dict[str, Any]) -> None:
        if lines[0].get("format") != _FORMAT:
            raise UsageError(f"{self.path} is not the journal of a calibration")
        if lines[0].get("machine") != machine:
            raise UsageError(
                f"{self.path} was begun on another machine or with other settings: delete it to begin anew"
            )
        begun: dict[str, None] = {}
        for line in lines[1:]:
            if "begun" in line:
                begun[line["begun"]] = None
            elif "skipped" in line:
                self.skipped[line["key"]] = str(line["skipped"])
            elif _is_time(line.get("ms")):
                self._add(line["key"], float(line["ms"]), float(line.get("rel_std", 0.0)))
        for key in begun:
            if key not in self.done and key not in self.skipped:
                self.skipped[key] = "it ended the process when it was tried"

    def begin(self, key: str) -> None:
        """The operator is about to be measured."""
        self._append({"begun": key})

    def finish(self, key: str, ms: float, rel_std: float) -> None:
        """It has been."""
        self._add(key, ms, rel_std)
        self._append({"key": key, "ms": ms, "rel_std": rel_std})

    def _add(self, key: str, ms: float, rel_std: float) -> None:
        """The mean of what there is and one more; its standard error likewise."""
        n = self.times[key]
        mean, std = self.done.get(key, (0.0, 0.0))
        self.times[key] += 1
        self.done[key] = (mean * n + ms) / (n + 1), math.hypot(std * n, rel_std) / (n + 1)

    def skip(self, key: str, why: str) -> None:
        """It cannot be."""
        self.skipped[key] = why
        self._append({"key": key, "skipped": why})

    def remove(self) -> None:
        """Everything has been measured and written elsewhere."""
        self._file.close()
        self.path.unlink(missing_ok=True)

    def _append(self, line: dict[str, Any]) -> None:
        self._file.write(json.dumps(line) + "\n")
        self._file.flush()
        os.fsync(self._file.fileno())

    def __enter__(self) -> Journal:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()


def _is_time(value: object) -> bool:
    return isinstance(value, int | float) and math.isfinite(value) and value > 0


def _read(path: Path) -> list[dict[str, Any]]:
    found = []
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as e:
        raise UsageError(f"{path} cannot be read: {e}") from e
    for line in text.splitlines():
        try:
            document = json.loads(line)
        except ValueError:
            continue
        if isinstance(document, dict):
            found.append(document)
    if text.strip() and not found:
        raise UsageError(f"{path} is not the journal of a calibration")
    return found
