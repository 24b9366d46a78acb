"""``autosac simulate --chakra`` writes Chakra execution traces, ``autosac chakra`` reads and executes them."""

from __future__ import annotations

import argparse
import json
from typing import Any

from autosac.display.tables import Table
from autosac.files.writing import check_folder
from autosac.quantities import format_ms
from autosac.simulation import Simulation


def check_chakra(arguments: argparse.Namespace) -> None:
    """UsageError if traces were asked for that cannot be written."""
    if arguments.chakra is not None:
        from autosac.chakra.schema import messages

        messages()
        check_folder(arguments.chakra)


def export_chakra(arguments: argparse.Namespace, simulation: Simulation) -> dict[str, Any]:
    """Write the traces that were asked for, and say what was written; empty if none were."""
    if arguments.chakra is None:
        return {}
    from autosac.chakra import write_chakra

    written = write_chakra(simulation.timeline, arguments.chakra, only_simulated=arguments.rank is not None)
    return {**written._asdict(), "folder": str(written.folder)}


def chakra(arguments: argparse.Namespace) -> None:
    """``autosac chakra``."""
    from autosac.chakra import read_chakra, replay

    found = replay(read_chakra(arguments.folder))
    if arguments.json:
        print(json.dumps(found._asdict(), indent=1))
        return
    from autosac.report import summaries as reports

    table = Table(title=f"Step time {format_ms(found.step_ms)}", title_justify="left")
    table.add_column("rank", justify="right")
    for heading in ("compute ms", "communication ms", "host ms"):
        table.add_column(heading, justify="right")
    rows = zip(found.ranks, found.compute_ms, found.communication_ms, found.host_ms, strict=True)
    for rank, *times in rows:
        table.add_row(str(rank), *(f"{ms:,.1f}" for ms in times))
    out = reports.console()
    out.print(table)
    out.print("nodes: " + ", ".join(f"{count} {kind}" for kind, count in sorted(found.nodes.items())))
