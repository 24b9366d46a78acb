"""What lies between reserved and active memory, as tables and in words."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.text import Text

from autosac.display.tables import Table
from autosac.memory_sim import Cause, IdleMemory, IdlePart
from autosac.quantities import format_bytes

_SMALLEST_BYTES = 2**20


def idle_table(idle: IdleMemory) -> RenderableType:
    """Every pool with free blocks: whose it is, why it cannot be used, what left them, and what gives them back."""
    request = idle.request
    where = f"{request.op} in {request.module or 'the step'} ({request.phase.name.lower()})"
    title = (
        f"{format_bytes(idle.reserved_bytes)} reserved, {format_bytes(idle.active_bytes)} of it active, "
        f"when {where} needed new memory"
    )
    table = Table(title=title)
    for heading in ("free", "blocks", "pool", "why it cannot be used", "left by", "what would free it"):
        table.add_column(heading, justify="right" if heading in ("free", "blocks") else "left")
    for part in idle.parts:
        if part.nbytes < _SMALLEST_BYTES:
            continue
        remnants = [
            f"{format_bytes(r.nbytes)} {r.op.removeprefix('aten.').removesuffix('.default')} {r.module}".rstrip()
            for r in part.remnants
        ]
        table.add_row(
            format_bytes(part.nbytes),
            str(part.blocks),
            part.stream + ", up to 1 MiB" * part.is_small,
            part.cause.value,
            "\n".join(remnants),
            remedy(part),
        )
    later = idle.active_peak_bytes - idle.active_bytes
    lines = [Text(f"Rounding up takes {format_bytes(idle.rounding_bytes)} of the active memory.")]
    if later > 0:
        lines.append(Text(f"Active memory peaks at another moment, {format_bytes(later)} higher than here."))
    return Group(table, *lines)


def remedy(part: IdlePart) -> str:
    """What would give a pool's free blocks back."""
    if part.cause is Cause.HOLE:
        return "a plan in which equal modules keep equal tensors; expandable segments"
    if part.cause is Cause.OTHER_POOL:
        return "nothing"
    if "all_gather" in part.stream:
        return "smaller FSDP units: these are their gathered parameters"
    if "reduce_scatter" in part.stream:
        return "smaller FSDP units, or gradients reduced in 16 bits (changes numbers)"
    return "work on fewer streams"
