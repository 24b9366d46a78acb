"""How the global MILP may see a trade-off of time against memory: the staircase's own hull, or the bound that pwlf fits.

    python -m benchmarks.curves [JOB.toml] [--gpu h100-sxm-80gb] [--shares 0.3,0.5,0.7] [--save docs/curves.md]

The job is captured once. Every model (`autosac.estimator.sac_curves`) with every number of lines is judged by

- its distance from the staircase, which is what the greedy policy really pays, as a share of the unit's recomputation time,
  at 401 discarded fractions of each distinct unit: the mean and the largest, above and below;
- the plan that follows from it for budgets between the least and no checkpointing: its recomputation, relative to the lower
  bound of the joint problem over all operators, without the joint problem's own polish, which would hide the difference;
- the time that the MILP and the local policies take.

Plans are those of the planner's own local solver, in active memory. `--polish` lets the joint problem improve them, as the
planner does.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np

from autosac.capture.process.server import CaptureServer
from autosac.errors import InfeasibleError
from autosac.estimator.sac_curves import Points, evaluate, tight_chords, upper_bound
from autosac.files.writing import write_text_atomically
from autosac.jobs.titan import TitanCaptures, TitanJob
from autosac.planning.planner import Goal, Planner
from autosac.quantities import format_bytes
from autosac.solvers import CurveSegment, GlobalProblem, joint_bound_ms, solve_two_level

JOB = Path(__file__).parents[1] / "examples" / "llama3_8b.toml"
_FRACTIONS = np.linspace(0, 1, 401).tolist()
_LINES = (1, 2, 3, 5)
_WHOLE = 10**6  # as many lines as the curve has


class Model(NamedTuple):
    """A model of the curves."""

    name: str
    lines: int
    fit: Callable[[Points, int], tuple[CurveSegment, ...]]

    @property
    def title(self) -> str:
        """Its name and number of lines."""
        return f"{self.name}, {'all' if self.lines == _WHOLE else self.lines}"


MODELS = (
    Model("staircase", _WHOLE, tight_chords),
    *(Model("staircase", lines, tight_chords) for lines in reversed(_LINES)),
    *(Model("pwlf", lines, upper_bound) for lines in reversed(_LINES)),
)


def staircase(points: Points, fraction: float) -> float:
    """What the greedy policy pays to discard this fraction: whole groups, as many as it takes."""
    return next((y for x, y in points if x >= fraction - 1e-12), points[-1][1])


def distances(points: Points, segments: Sequence[CurveSegment]) -> np.ndarray:
    """The model minus the staircase at many fractions."""
    return np.array([evaluate(segments, x) - staircase(points, x) for x in _FRACTIONS])


def _tightness(curves: Sequence[Points], model: Model) -> str:
    gaps = np.concatenate([distances(points, model.fit(points, model.lines)) for points in curves])
    return f"{np.abs(gaps).mean():.1%} | {max(gaps.max(), 0):.1%} | {max(-gaps.min(), 0):.1%}"


class Bench:
    """The problem of one captured job, with the units' curves by any model."""

    def __init__(self, planner: Planner, polish_s: float) -> None:
        self._planner = planner
        self._polish_s = polish_s
        self.problem, self.items = planner.priced()
        units = [planner.policies.of_module(module) for module in planner.problem.modules]
        self.curves: list[Points] = [unit.sac.tradeoff.curve() for unit in units]

    def budgets(self, shares: Sequence[float]) -> list[int]:
        """Bytes at these shares of the way from the least that will do to no checkpointing."""
        most = int(self.problem.peaks_bytes([None] * len(self.problem.units)).max())
        _, least = self._planner.measured(self._planner.smallest())
        return [int(least + share * (most - least)) for share in shares]

    def modelled(self, model: Model) -> GlobalProblem:
        """The problem whose units have this model's lines."""
        pairs = zip(self.problem.units, self.curves, strict=True)
        units = tuple(replace(unit, segments=model.fit(points, model.lines)) for unit, points in pairs)
        return replace(self.problem, units=units)

    def row(self, model: Model, budgets: Sequence[int], bounds_ms: Sequence[float]) -> str:
        """The model's line of the table."""
        begin = time.process_time()
        problem = self.modelled(model)
        fitting_s, cells, seconds = time.process_time() - begin, [], 0.0
        for budget, bound_ms in zip(budgets, bounds_ms, strict=True):
            begin = time.monotonic()
            cells.append(self._cell(problem, budget, bound_ms))
            seconds += time.monotonic() - begin
        tightness = _tightness(sorted(set(self.curves)), model)
        return f"| {model.title} | {tightness} | {' | '.join(cells)} | {fitting_s:.2f} | {seconds / len(budgets):.2f} |"

    def _cell(self, problem: GlobalProblem, budget: int, bound_ms: float) -> str:
        local = self._planner.goal.solver
        try:
            solution = solve_two_level(
                problem, self.items, budget, local=local, polish_s=self._polish_s, time_limit_s=60.0
            )
        except InfeasibleError:
            return "none"
        return f"{solution.recompute_ms / bound_ms - 1:+.2%}" if bound_ms > 0 else f"{solution.recompute_ms:.2f} ms"


def report(planner: Planner, title: str, shares: Sequence[float], polish_s: float) -> str:
    """A section with the table of one job."""
    bench = Bench(planner, polish_s)
    budgets = bench.budgets(shares)
    bounds_ms = [joint_bound_ms(bench.problem, bench.items, budget) for budget in budgets]
    limits = [f"{format_bytes(b)} (bound {ms:.0f} ms)" for b, ms in zip(budgets, bounds_ms, strict=True)]
    headings = ["curve, lines", "mean distance", "most above", "most below", *limits, "fit (s)", "solve (s)"]
    return "\n".join(
        [
            f"## {title}",
            "",
            f"{len(bench.curves)} units, {len(set(bench.curves))} different curves of up to {max(map(len, bench.curves)) - 1} "
            "steps.",
            "",
            "| " + " | ".join(headings) + " |",
            "|---" + "|--:" * (len(headings) - 1) + "|",
            *(bench.row(model, budgets, bounds_ms) for model in MODELS),
            "",
        ]
    )


def main() -> None:
    """Parse, run, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("job", nargs="?", default=str(JOB))
    parser.add_argument("--gpu", default="h100-sxm-80gb")
    parser.add_argument("--world-size", type=int, default=8)
    parser.add_argument("--shares", default="0.3,0.5,0.7", help="budgets between the least and no checkpointing")
    parser.add_argument("--polish", action="store_true", help="let the joint problem improve the plans")
    parser.add_argument("--save", type=Path, help="append the section to this Markdown file")
    arguments = parser.parse_args()
    job = TitanJob.of(arguments.job, gpu=arguments.gpu, world_size=arguments.world_size)
    with tempfile.TemporaryDirectory(prefix="autosac-") as folder, CaptureServer() as server:
        base = TitanCaptures(job, server, Path(folder)).observed()
    planner = Planner(base, Goal(budget_bytes=1, budget_kind="active"))
    shares = [float(share) for share in arguments.shares.split(",")]
    title = f"{Path(arguments.job).stem} on {arguments.world_size} x {arguments.gpu}"
    title += ", polished" if arguments.polish else ""
    text = report(planner, title, shares, 2.0 if arguments.polish else 0.0)
    print(text)
    if arguments.save:
        before = arguments.save.read_text(encoding="utf-8") if arguments.save.exists() else ""
        write_text_atomically(arguments.save, before + text + "\n")


if __name__ == "__main__":
    main()
