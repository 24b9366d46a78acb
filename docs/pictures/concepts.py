"""The pictures of the page Concepts.

    python docs/pictures/concepts.py FOLDER      # writes activations.svg, recompute.svg, msps.svg and reserved.svg

`activations` and `recompute` show a model of four equal layers that can be followed by hand. `msps` shows one layer of
Llama-3 8B with the figures of `autosac explain plan.json --module layers.0`. `reserved` is what the simulated caching
allocator answers to a short list of requests.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from autosac.memory_sim.allocator import CachingAllocator
from autosac.memory_sim.allocator_config import AllocatorConfig

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

BLUE, ORANGE, GREY, GREEN, RED = "#1e88e5", "#fb8c00", "#90a4ae", "#43a047", "#c62828"
MIB = 2**20


def _figure(width: float, height: float, columns: int = 1) -> tuple[Figure, list[Axes]]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    axes = [figure.add_subplot(1, columns, i + 1) for i in range(columns)]
    for each in axes:
        each.spines[["top", "right"]].set_visible(False)
    return figure, axes


# ---- activations: memory over a step ---------------------------------------------------------------------------

LAYERS = 4
INPUT_GIB, INSIDE_GIB = 1.0, 3.0
FORWARD_MS, BACKWARD_MS = 1.0, 2.0


def memory_over_step(recomputed: Sequence[bool]) -> tuple[list[float], list[float], list[tuple[float, float]]]:
    """The step of a model of `LAYERS` layers, some of them recomputed: times (ms), memory from then on (GiB), and when layers
    are recomputed (begin, end).

    A layer's forward makes its input and what lies inside the layer. A recomputed layer keeps only the input, and makes the
    rest again before its backward.
    """
    now, memory = 0.0, 0.0
    times, levels, again = [0.0], [0.0], []

    def go(ms: float, change_gib: float) -> None:
        nonlocal now, memory
        now, memory = now + ms, memory + change_gib
        times.append(now)
        levels.append(memory)

    for recompute in recomputed:
        go(FORWARD_MS, INPUT_GIB + INSIDE_GIB)
        if recompute:
            go(0.0, -INSIDE_GIB)
    for recompute in reversed(recomputed):
        if recompute:
            again.append((now, now + FORWARD_MS))
            go(FORWARD_MS, INSIDE_GIB)
        go(BACKWARD_MS, -INPUT_GIB - INSIDE_GIB)
    return times, levels, again


def activations(path: Path) -> None:
    """Memory over the step of the four layers: all kept, all recomputed, half of them recomputed."""
    figure, axes = _figure(10, 2.9, 3)
    cases = {
        "keep everything": [False] * LAYERS,
        "recompute every layer": [True] * LAYERS,
        "recompute two layers": [True, True, False, False],
    }
    for axis, (title, recomputed) in zip(axes, cases.items(), strict=True):
        times, levels, again = memory_over_step(recomputed)
        axis.step(times, levels, where="post", color=BLUE)
        axis.fill_between(times, levels, step="post", color=BLUE, alpha=0.15)
        for begin, end in again:
            axis.axvspan(begin, end, color=ORANGE, alpha=0.3, linewidth=0)
        axis.axvline(FORWARD_MS * LAYERS, color=GREY, linestyle=":")
        axis.set(xlim=(0, 17), ylim=(0, 18), xlabel="time (ms)", title=f"{title}\n")
        axis.text(0, 18.1, f"peak {max(levels):g} GiB, step {times[-1]:g} ms", fontsize=9, color="#37474f")
        axis.text(FORWARD_MS * LAYERS + 0.2, 16.8, "backward", fontsize=8, color="#546e7a")
        axis.text(0.2, 16.8, "forward", fontsize=8, color="#546e7a")
    axes[0].set_ylabel("activations (GiB)")
    axes[1].text(9.5, 12.0, "orange: recomputing", fontsize=8, color="#e65100")
    figure.savefig(path, metadata={"Date": None})


# ---- recompute: what happens to one layer ----------------------------------------------------------------------

CHAIN = ("norm", "linear 1", "silu", "linear 2")


def recompute(path: Path) -> None:
    """One layer in the forward, between forward and backward, and in the backward; linear 1 is kept."""
    from matplotlib.patches import Circle, FancyArrowPatch

    figure, (axis,) = _figure(9, 3.4)
    axis.axis("off")
    axis.set(xlim=(-2.2, 9.6), ylim=(-0.7, 3.1))
    rows = (
        (2.4, "forward", "all results are made", (GREEN,) * 5),
        (
            1.2,
            "until the backward",
            "only the input and linear 1 stay in memory",
            (GREEN, "white", GREEN, "white", "white"),
        ),
        (0.0, "backward", "norm and silu run again, linear 1 does not", (GREEN, ORANGE, GREEN, ORANGE, "white")),
    )
    for y, when, what, colors in rows:
        axis.text(-2.2, y + 0.1, when, fontsize=10, weight="bold")
        axis.text(-2.2, y - 0.45, what, fontsize=8, color="#546e7a")
        for i, (name, color) in enumerate(zip(("input", *CHAIN), colors, strict=True)):
            x = 2.0 + 1.8 * i
            axis.add_patch(Circle((x, y), 0.2, facecolor=color, edgecolor="#455a64", zorder=2))
            axis.text(x, y + 0.32, name, ha="center", fontsize=8)
            runs = i > 0 and (y == 2.4 or color == ORANGE)
            if runs:
                arrow = FancyArrowPatch((x - 1.6, y), (x - 0.2, y), arrowstyle="-|>", mutation_scale=10)
                arrow.set(color=ORANGE if y == 0.0 else "#78909c", zorder=1)
                axis.add_patch(arrow)
    axis.set_aspect("equal")
    figure.savefig(path, metadata={"Date": None})


# ---- MSPS: one real layer --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Operator:
    """An operator of the layer: what recomputing it frees and costs."""

    name: str
    memory_mib: float
    runtime_ms: float

    @property
    def msps(self) -> float:
        """GiB saved per second of recomputation; infinite if it takes no time."""
        return self.memory_mib / 1024 / (self.runtime_ms / 1000) if self.runtime_ms else float("inf")


# Llama-3 8B, FSDP on 8 H100s, two sequences of 8,192 tokens: autosac explain plan.json --module layers.0
LAYER = (
    Operator("RMS norm", 128.1, 0.138),
    Operator("mm (query)", 128.0, 0.724),
    Operator("mm (key)", 32.0, 0.175),
    Operator("mm (value)", 32.0, 0.175),
    Operator("to float32", 256.0, 0.177),
    Operator("to float32", 64.0, 0.044),
    Operator("rotary", 256.0, 0.332),
    Operator("rotary", 64.0, 0.085),
    Operator("to bfloat16", 128.0, 0.145),
    Operator("to bfloat16", 32.0, 0.036),
    Operator("attention", 130.0, 1.605),
    Operator("mm (output)", 128.0, 0.724),
    Operator("add", 128.0, 0.145),
    Operator("RMS norm", 128.1, 0.138),
    Operator("mm (w1)", 448.0, 2.570),
    Operator("silu", 448.0, 0.338),
    Operator("mm (w3)", 448.0, 2.570),
    Operator("mul", 448.0, 0.507),
    Operator("mm (w2)", 128.0, 0.0),
    Operator("add", 128.0, 0.0),
)


def msps(path: Path) -> None:
    """The layer's operators, those that save most memory per second first, and the trade-off curve that follows."""
    order = sorted(LAYER, key=lambda operator: -operator.msps)
    figure, (left, right) = _figure(10, 4.2, 2)
    timed = [operator for operator in order if operator.runtime_ms]
    left.barh(range(len(timed)), [operator.msps for operator in timed], color=BLUE, alpha=0.7)
    left.set_yticks(range(len(timed)), [operator.name for operator in timed], fontsize=8)
    left.invert_yaxis()
    left.set(xlabel="MSPS (GiB per second)", title="recompute from the top")
    freed, cost = [0.0], [0.0]
    for operator in order:
        freed.append(freed[-1] + operator.memory_mib / 1024)
        cost.append(cost[-1] + operator.runtime_ms)
    right.plot(freed, cost, color=ORANGE, marker="o", markersize=3)
    right.set(xlabel="memory freed in this layer (GiB)", ylabel="recomputation (ms)", title="the trade-off curve")
    for name in ("silu", "mm (w1)", "attention"):
        i = next(i for i, operator in enumerate(order, 1) if operator.name == name)
        right.annotate(name, (freed[i], cost[i]), xytext=(-8, 8), textcoords="offset points", ha="right", fontsize=8)
    right.set_ylim(-0.3, cost[-1] * 1.08)
    figure.savefig(path, metadata={"Date": None})


# ---- reserved against active -----------------------------------------------------------------------------------

# (name, MiB) allocates, (name,) frees: three results, two of them die, and a larger one comes.
REQUESTS: tuple[tuple[str, int] | tuple[str], ...] = (
    ("a", 400),
    ("b", 300),
    ("c", 400),
    ("a",),
    ("c",),
    ("d", 600),
    ("b",),
    ("d",),
)


def allocator_answers(config: AllocatorConfig) -> tuple[list[str], list[float], list[float]]:
    """What was asked for, and the active and reserved bytes after it in MiB, by the simulated caching allocator."""
    allocator, live = CachingAllocator(config), {}
    labels, active, reserved = ["start"], [0.0], [0.0]
    for name, *size in REQUESTS:
        if size:
            live[name] = allocator.malloc(int(size[0]) * MIB)
        else:
            allocator.free(live.pop(name))
        labels.append(f"{name}: {size[0]} MiB" if size else f"free {name}")
        active.append(allocator.active_bytes / MIB)
        reserved.append(allocator.reserved_bytes / MIB)
    return labels, active, reserved


def reserved(path: Path) -> None:
    """Active and reserved memory under the same requests, in segments of fixed size and in expandable ones."""
    figure, axes = _figure(10, 3.6, 2)
    settings = {"fixed segments (PyTorch's default)": "", "expandable_segments:True": "expandable_segments:True"}
    for axis, (title, text) in zip(axes, settings.items(), strict=True):
        labels, active, held = allocator_answers(AllocatorConfig.parse(text))
        places = range(len(labels))
        axis.step(places, held, where="post", color=RED, label="reserved")
        axis.step(places, active, where="post", color=BLUE, label="active")
        axis.fill_between(places, active, held, step="post", color=RED, alpha=0.12)
        axis.set_xticks(places, labels, rotation=50, ha="right", fontsize=8)
        axis.set(title=f"{title}\npeak active {max(active):,.0f}, reserved {max(held):,.0f} MiB", ylim=(0, 1850))
    axes[0].set_ylabel("MiB")
    axes[0].legend(loc="upper left", frameon=False)
    figure.savefig(path, metadata={"Date": None})


PICTURES: dict[str, Callable[[Path], None]] = {
    "activations": activations,
    "recompute": recompute,
    "msps": msps,
    "reserved": reserved,
}


def draw_all(folder: Path, suffix: str = ".svg") -> None:
    """All pictures."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, draw in PICTURES.items():
        draw(folder / f"{name}{suffix}")


if __name__ == "__main__":
    draw_all(Path(sys.argv[1]))
