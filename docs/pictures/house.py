"""The picture of the house: its rooms (folders) and the arrows between them (imports), read from the code.

    python docs/pictures/house.py FOLDER               # writes before.svg, house.svg, those of HALLS, counts.md and rooms.md
    python docs/pictures/house.py --record PACKAGE     # prints what before.json holds, of another clone's autosac/

A room is a folder of `autosac/`. Single files such as `simulation.py` are rooms of their own, and so are the two modules with
which capture enters TorchTitan: they stand on the ground floor, and the plugin around them on the roof. An arrow goes from a
room to one that it imports; imports for type checkers only do not count. To be readable, a picture leaves out

- arrows that follow from others (A to C, if there are A to B and B to C): the table lists them all;
- arrows to the cellar (`CELLAR`), which every room may use.

Rooms stand on the floor that their imports give them: each is above all rooms that it imports. Where rooms import each other
in a circle, the arrow with the fewest imports is drawn in red, from the lower floor to the upper one.
"""

from __future__ import annotations

import ast
import functools
import json
import os
import sys
import textwrap
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

PACKAGE = Path(__file__).parents[2] / "autosac"
BEFORE = Path(__file__).with_name("before.json")
"""Rooms and arrows before the redesign, as `--record` has printed them for the last commit before it."""
CELLAR = (
    "call_stack",
    "choices",
    "display",
    "errors",
    "files",
    "interrupts",
    "limits",
    "progress",
    "quantities",
    "target",
    "torch_version",
)
FRONT_DOOR = ("__init__", "__main__")
HOOKS = ("hook", "policy_hook")
HALLS = ("capture", "configurations")
"""Rooms whose own rooms get a picture."""

Arrows = Mapping[tuple[str, str], int]
_WIDTH, _HEIGHT = 1.8, 0.46
_LETTERS = 24  # in a line of a box


# ---- reading the code ------------------------------------------------------------------------------------------


def modules(package: Path = PACKAGE) -> dict[str, Path]:
    """Every module of the package by its name below ``autosac.``."""
    found = {}
    for folder, folders, files in os.walk(package, followlinks=True):
        folders[:] = sorted(name for name in folders if name != "__pycache__")
        for name in sorted(files):
            if name.endswith(".py"):
                path = Path(folder) / name
                found[".".join(path.relative_to(package).with_suffix("").parts)] = path
    return found


class _Imports(ast.NodeVisitor):
    """The names below ``autosac.`` that a module imports when it runs."""

    def __init__(self) -> None:
        self.names: list[str] = []

    def visit_If(self, node: ast.If) -> None:
        """Skip what is for type checkers only."""
        if not (isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"):
            self.generic_visit(node)

    def visit_Import(self, node: ast.Import) -> None:
        """``import autosac.x``."""
        self.names += [alias.name for alias in node.names]

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        """``from autosac.x import y``, where y may be a module."""
        self.names += [f"{node.module}.{alias.name}" for alias in node.names if node.module]


@functools.cache
def imports(package: Path = PACKAGE) -> tuple[tuple[str, str], ...]:
    """(importing module, imported module) for every import inside the package."""
    return tuple(_imports(modules(package)))


def _imports(known: Mapping[str, Path]) -> Iterator[tuple[str, str]]:
    for module, path in known.items():
        visitor = _Imports()
        visitor.visit(ast.parse(path.read_text(encoding="utf-8")))
        for name in visitor.names:
            if not name.startswith("autosac."):
                continue
            parts = name.removeprefix("autosac.").split(".")
            while parts and not {".".join(parts), ".".join([*parts, "__init__"])} & known.keys():
                parts.pop()
            if parts:
                target = ".".join(parts)
                yield module, target if target in known else f"{target}.__init__"


def room(module: str) -> str | None:
    """The room of a module; None for the front door (``autosac/__init__.py``) and the cellar."""
    first, *rest = module.split(".")
    if first in CELLAR or first in FRONT_DOOR:
        return None
    if first == "integrations" and rest[:1] == ["torchtitan"]:
        return "integrations.torchtitan.hook" if rest[-1] in HOOKS else "integrations.torchtitan"
    return first


def inner_room(hall: str, module: str) -> str | None:
    """The room inside a hall that a module is in; None for what is not in any."""
    first, *rest = module.split(".")
    return rest[0] if first == hall and len(rest) > 1 else None


def arrows(room_of: Callable[[str], str | None], package: Path = PACKAGE) -> Counter[tuple[str, str]]:
    """How many imports go from one room to another."""
    found: Counter[tuple[str, str]] = Counter()
    for importer, imported in imports(package):
        a, b = room_of(importer), room_of(imported)
        if a is not None and b is not None and a != b:
            found[a, b] += 1
    return found


# ---- floors ----------------------------------------------------------------------------------------------------


def _circle(edges: Arrows) -> list[tuple[str, str]]:
    """The arrows of one circle; none if there is no circle."""
    following: dict[str, list[str]] = {}
    for a, b in edges:
        following.setdefault(a, []).append(b)
    done: set[str] = set()

    def walk(path: list[str]) -> list[tuple[str, str]]:
        for after in sorted(following.get(path[-1], ())):
            if after in path:
                loop = [*path[path.index(after) :], after]
                return list(pairwise(loop))
            if after not in done and (found := walk([*path, after])):
                return found
        done.add(path[-1])
        return []

    for start in sorted(following):
        if start not in done and (found := walk([start])):
            return found
    return []


def one_way(edges: Arrows) -> tuple[dict[tuple[str, str], int], dict[tuple[str, str], int]]:
    """The arrows without circles, and those that were taken out of circles, the lightest of each."""
    down, up = dict(edges), {}
    while circle := _circle(down):
        lightest = min(circle, key=lambda edge: (down[edge], edge))
        up[lightest] = down.pop(lightest)
    return down, up


def floors(down: Arrows, rooms: set[str]) -> dict[str, int]:
    """The floor of each room: 0 if it imports no other room, else one above the highest that it imports."""
    found: dict[str, int] = {}

    def floor(name: str) -> int:
        if name not in found:
            found[name] = 1 + max((floor(b) for a, b in down if a == name), default=-1)
        return found[name]

    return {name: floor(name) for name in sorted(rooms)}


def direct(down: Arrows) -> list[tuple[str, str]]:
    """The arrows that do not follow from others."""

    @functools.cache
    def reaches(a: str, b: str) -> bool:
        return any(c == b or reaches(c, b) for x, c in down if x == a)

    return [(a, b) for a, b in down if not any(c != b and reaches(c, b) for x, c in down if x == a)]


# ---- drawing ---------------------------------------------------------------------------------------------------


def _places(level: Mapping[str, int], shown: list[tuple[str, str]]) -> dict[str, tuple[float, float]]:
    """Coordinates of every room: on its floor, near the rooms that it is connected with."""
    rows: dict[int, list[str]] = {}
    for name in sorted(level):
        rows.setdefault(level[name], []).append(name)
    x = {name: i - (len(row) - 1) / 2 for row in rows.values() for i, name in enumerate(row)}
    for _ in range(30):
        for row in rows.values():
            near = {}
            for name in row:
                others = [x[b] for a, b in shown if a == name] + [x[a] for a, b in shown if b == name]
                near[name] = sum(others) / len(others) if others else x[name]
            row.sort(key=lambda name: (near[name], name))
            middle = sum(near.values()) / len(row)
            for i, name in enumerate(row):
                x[name] = middle + i - (len(row) - 1) / 2
    return {name: (x[name] * 2.1, level[name] * 1.05) for name in level}


def draw(path: Path, edges: Arrows, rooms: set[str], foundation: str = "") -> None:
    """Write the picture of these rooms and arrows; `foundation` is the text of the box below all of them."""
    from matplotlib.figure import Figure
    from matplotlib.patches import FancyArrowPatch, FancyBboxPatch

    down, up = one_way(edges)
    level, shown = floors(down, rooms), direct(down)
    place = _places(level, shown)
    left, right = min(x for x, _ in place.values()) - 1.1, max(x for x, _ in place.values()) + 1.1
    top, bottom = max(y for _, y in place.values()) + 0.5, -1.2 if foundation else -0.5
    figure = Figure(figsize=((right - left) * 0.85, (top - bottom) * 0.85))
    axes = figure.add_axes((0.0, 0.0, 1.0, 1.0))
    axes.set_xlim(left, right)
    axes.set_ylim(bottom, top)
    axes.axis("off")

    def box(x: float, y: float, width: float, text: str, color: str) -> None:
        shape = FancyBboxPatch((x - width / 2, y - _HEIGHT / 2), width, _HEIGHT, boxstyle="round,pad=0.02")
        shape.set(facecolor=color, edgecolor="#455a64", linewidth=1.0, zorder=2)
        axes.add_patch(shape)
        axes.text(x, y, text, ha="center", va="center", fontsize=9, zorder=3)

    for a, b in [*shown, *up]:
        (xa, ya), (xb, yb) = place[a], place[b]
        against = (a, b) in up
        side = _HEIGHT / 2 * (1 if against else -1)
        bend = 0.25 if against else 0.12 * (level[a] - level[b] > 1) * (1 if xa >= xb else -1)
        arrow = FancyArrowPatch((xa, ya + side), (xb, yb - side), arrowstyle="-|>", mutation_scale=11)
        arrow.set(color="#c62828" if against else "#78909c", linewidth=1.0, zorder=1)
        arrow.set_linestyle("--" if against else "-")
        arrow.set_connectionstyle(f"arc3,rad={bend}")
        axes.add_patch(arrow)
    for name, (x, y) in place.items():
        box(x, y, _WIDTH, name if len(name) <= _LETTERS else name.replace(".", ".\n", 1), "#e3f2fd")
    if foundation:
        width = right - left - 0.4
        box((left + right) / 2, -0.85, width, textwrap.fill(foundation, int(width / _WIDTH * _LETTERS)), "#eceff1")
    figure.savefig(path, metadata={"Date": None})


# ---- numbers ---------------------------------------------------------------------------------------------------


def table() -> str:
    """Rooms, their modules and all that they import, and the counts before and after, as Markdown."""
    known, edges = list(modules()), arrows(room)
    lines = ["| room | modules | imports |", "|---|--:|---|"]
    for name in sorted({found for module in known if (found := room(module)) is not None}):
        count = sum(room(module) == name for module in known if not module.endswith("__init__"))
        targets = ", ".join(f"{b} {n}" for (a, b), n in sorted(edges.items()) if a == name)
        lines.append(f"| `{name}` | {count} | {targets or 'none'} |")
    return "\n".join(lines) + "\n"


def record(package: Path = PACKAGE) -> dict[str, Any]:
    """A package's rooms with their numbers of modules, the arrows between them, and the folders of capture, as a document."""
    plain = [module for module in modules(package) if not module.endswith("__init__")]
    rooms = Counter(name for module in plain if (name := room(module)) is not None)
    edges: dict[str, dict[str, int]] = {}
    for (a, b), count in sorted(arrows(room, package).items()):
        edges.setdefault(a, {})[b] = count
    loose = [module for module in plain if "." not in module and module not in FRONT_DOOR]
    capture = [module.split(".") for module in plain if module.startswith("capture.")]
    return {
        "rooms": dict(sorted(rooms.items())),
        "arrows": edges,
        "loose": len(loose),
        "folders": len({module.split(".")[0] for module in plain if "." in module}),
        "capture_loose": sum(len(parts) == 2 for parts in capture),
        "capture_folders": len({parts[1] for parts in capture if len(parts) > 2}),
    }


def arrows_of(document: Mapping[str, Any]) -> dict[tuple[str, str], int]:
    """The arrows of what `record` returns."""
    return {(a, b): count for a, targets in document["arrows"].items() for b, count in targets.items()}


def counts() -> str:
    """The size of the hall before and after the redesign, as Markdown."""
    columns = (json.loads(BEFORE.read_text(encoding="utf-8")), record())
    rows = (
        ("modules of `autosac/` that are in no folder", [each["loose"] for each in columns]),
        ("folders of `autosac/`, the five rooms among them", [each["folders"] for each in columns]),
        ("modules of `capture/` that are in no folder", [each["capture_loose"] for each in columns]),
        ("folders of `capture/`", [each["capture_folders"] for each in columns]),
        ("rooms in the picture", [len(each["rooms"]) for each in columns]),
        ("arrows between them", [len(arrows_of(each)) for each in columns]),
        ("arrows that close a circle", [len(one_way(arrows_of(each))[1]) for each in columns]),
    )
    lines = [f"| {name} | {before} | {now} |" for name, (before, now) in rows]
    return "\n".join(("| | before | now |", "|---|--:|--:|", *lines, ""))


def draw_all(folder: Path) -> None:
    """All pictures and both tables."""
    folder.mkdir(parents=True, exist_ok=True)
    cellar = f"the cellar, which every room may use: {', '.join(CELLAR)}"
    draw(folder / "house.svg", arrows(room), set(filter(None, map(room, modules()))), cellar)
    for hall in HALLS:
        inside = functools.partial(inner_room, hall)
        draw(folder / f"{hall}.svg", arrows(inside), set(filter(None, map(inside, modules()))))
    before = json.loads(BEFORE.read_text(encoding="utf-8"))
    draw(folder / "before.svg", arrows_of(before), set(before["rooms"]))
    (folder / "rooms.md").write_text(table(), encoding="utf-8")
    (folder / "counts.md").write_text(counts(), encoding="utf-8")


if __name__ == "__main__":
    if sys.argv[1] == "--record":
        print(json.dumps(record(Path(sys.argv[2])), indent=1))
    else:
        draw_all(Path(sys.argv[1]))
