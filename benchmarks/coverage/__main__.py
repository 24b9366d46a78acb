"""Run the rows of rows.toml one by one and write the table, after each row anew.

    python -m benchmarks.coverage [--small | --real] [--rows PATTERN] [--limit SECONDS] [--missing] [-o docs/coverage.md]

PATTERN is a regular expression that is searched for in "size: group: name". The results lie beside the table, in a file of
the same name with the ending .json; rows that are not run keep theirs. Ends with 1 if a row failed that should not, or did
not fail as it should.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from dataclasses import asdict, fields
from pathlib import Path

from autosac.files.writing import write_text_atomically
from benchmarks.coverage.measure import Result, run
from benchmarks.coverage.rows import SIZES, Row, load_rows
from benchmarks.coverage.table import as_expected, markdown


def main() -> int:
    """See the module's docstring."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    size = parser.add_mutually_exclusive_group()
    for name in SIZES:
        size.add_argument(f"--{name}", dest="size", action="store_const", const=name, help=f"{name} jobs only")
    parser.add_argument("--rows", default="", metavar="PATTERN", help="only rows whose key has this")
    parser.add_argument("--limit", type=float, default=900.0, metavar="S", help="seconds for one row (default 900)")
    parser.add_argument("--missing", action="store_true", help="only rows without a result")
    parser.add_argument("-o", "--output", type=Path, default=Path("docs/coverage.md"), metavar="FILE.md")
    arguments = parser.parse_args()
    rows = load_rows()
    file = arguments.output.with_suffix(".json")
    results = _load(file, rows)
    wanted = [
        row
        for row in rows
        if arguments.size in (None, row.size)
        and re.search(arguments.rows, row.key)
        and not (arguments.missing and row.key in results)
    ]
    good = True
    for row in wanted:
        result = run(row, arguments.limit)
        results = {**_load(file, rows), row.key: result}  # another run may have written meanwhile
        kept = {known.key: asdict(results[known.key]) for known in rows if known.key in results}
        write_text_atomically(file, json.dumps(kept, indent=1) + "\n")
        write_text_atomically(arguments.output, markdown(rows, results))
        expected = as_expected(row, result)
        good = good and expected
        print(f"{' ' if expected else '!'} {row.key}: {result.outcome} {result.reason}", flush=True)
    return 0 if good else 1


def _load(file: Path, rows: tuple[Row, ...]) -> dict[str, Result]:
    """The results of earlier runs, of rows and with figures that still exist."""
    if not file.exists():
        return {}
    known = {row.key for row in rows}
    names = {field.name for field in fields(Result)}
    found = {key: values for key, values in json.loads(file.read_text()).items() if key in known}
    return {key: Result(**{n: v for n, v in values.items() if n in names}) for key, values in found.items()}


if __name__ == "__main__":
    sys.exit(main())
