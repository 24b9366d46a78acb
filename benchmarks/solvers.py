"""Solver speed and quality on a synthetic transformer, beside PyTorch's own `torch.distributed._tools`.

    python -m benchmarks.solvers [--blocks 20 80 160] [--budget 0.6] [--upstream] [--time-limit 180]

The model: identical Llama-3 70B blocks (batch 1, sequence 8192, bf16), each with its attention and its feed-forward as
nested units; operator times from 600 TFLOP/s and 2.5 TB/s. The peak is at the end of the forward, or at any block's
backward. Both sides get the same operator statistics and the same budget, a fraction of the peak without checkpointing:

- ours: curves, global MILP with a local policy for every unit, LP bound of the joint problem;
- upstream: `SACEstimator`'s pwlf fit (two segments), `sac_milp`, `get_optimal_checkpointing_policy_per_module`.

Every resulting plan is evaluated by the same code: recomputation of the operators it does not keep, highest peak against
the budget. Times are of one process, without imports.
"""

from __future__ import annotations

import argparse
import functools
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import autosac.estimator.sac_curves as curves
from autosac.bench import pytorch_tools
from autosac.errors import AutosacError, InfeasibleError
from autosac.estimator.sac_rules import OperatorGroup
from autosac.estimator.sac_stats import SACModStats, SACOperator, tradeoff
from autosac.solvers import (
    GlobalProblem,
    GlobalUnit,
    PeakPoint,
    joint_bound_ms,
    local_solver,
    recompute_ms,
    relative_gap,
    solve_two_level,
)

MIB = 2**20
TOKENS, HIDDEN, KV, FFN, HEADS = 8192, 8192, 1024, 28672, 64
FLOPS_PER_MS, BYTES_PER_MS = 600e9, 2.5e9

Plan = list[tuple[int, ...] | None]


class Operator(NamedTuple):
    """Name, time, bytes of the result, and whether autograd saves it."""

    name: str
    ms: float
    nbytes: int
    saved: bool = True


def matmul(inner: int, outer: int, saved: bool = True) -> list[Operator]:
    """A linear layer: transpose and two views around the product."""
    product = Operator("mm", 2 * TOKENS * inner * outer / FLOPS_PER_MS, 2 * TOKENS * outer, saved)
    return [Operator("t", 0, 0), Operator("view", 0, 0), product, Operator("_unsafe_view", 0, 0)]


def elementwise(name: str, width: int, saved: bool = True, traffic: int = 2, item: int = 2) -> Operator:
    """A bandwidth-bound operator that makes `width` numbers per token and touches `traffic` times as many."""
    return Operator(name, traffic * item * TOKENS * width / BYTES_PER_MS, item * TOKENS * width, saved)


def norm(width: int) -> list[Operator]:
    """A composite RMSNorm in fp32."""
    wide = functools.partial(elementwise, width=width, item=4)
    return [
        wide("_to_copy"),
        wide("pow", saved=False),
        Operator("mean", 4 * TOKENS * width / BYTES_PER_MS, 4 * TOKENS, False),
        Operator("add", 0.002, 4 * TOKENS, False),
        Operator("rsqrt", 0.002, 4 * TOKENS),
        wide("mul", saved=False, traffic=3),
        elementwise("_to_copy", width),
        elementwise("mul", width, traffic=3),
    ]


def block_operators() -> tuple[list[Operator], list[Operator], list[Operator]]:
    """Operators of a block's attention and feed-forward, and of what surrounds them."""
    rope = [Operator("view", 0, 0), elementwise("mul", HIDDEN, saved=False, traffic=4), Operator("view", 0, 0)]
    rope += [elementwise("_to_copy", HIDDEN), elementwise("_to_copy", KV)]
    attention = matmul(HIDDEN, HIDDEN) + matmul(HIDDEN, KV) + matmul(HIDDEN, KV) + rope
    attention += [Operator("transpose", 0, 0)] * 6
    attention.append(Operator("sdpa", 2 * TOKENS**2 * HIDDEN / FLOPS_PER_MS, 2 * TOKENS * HIDDEN + 4 * TOKENS * HEADS))
    attention += [Operator("transpose", 0, 0), Operator("view", 0, 0), *matmul(HIDDEN, HIDDEN, saved=False)]
    forward = [*matmul(HIDDEN, FFN), elementwise("silu", FFN), *matmul(HIDDEN, FFN)]
    forward += [elementwise("mul", FFN, traffic=3), *matmul(FFN, HIDDEN, saved=False)]
    around = norm(HIDDEN) + norm(HIDDEN) + [elementwise("add", HIDDEN, traffic=3)] * 2
    return attention, forward, around


@dataclass(frozen=True, kw_only=True)
class Model:
    """The statistics of every unit (block, attention, feed-forward; block after block) and their implicit bytes."""

    stats: tuple[SACModStats, ...]
    implicit_bytes: tuple[int, ...]

    @staticmethod
    def of(blocks: int) -> Model:
        """A model of so many blocks."""
        attention, forward, around = block_operators()
        stats, implicit = [], []
        for b in range(blocks):
            for suffix, operators in (
                ("", [*around, *attention, *forward]),
                (".attention", attention),
                (".feed_forward", forward),
            ):
                stats.append(statistics(f"layers.{b}{suffix}", operators))
                implicit.append(sum(op.nbytes for op in operators if op.saved))
        return Model(stats=tuple(stats), implicit_bytes=tuple(implicit))

    def points(self) -> tuple[PeakPoint, ...]:
        """The end of every unit's forward, the loss, the beginning of every unit's backward."""
        blocks = len(self.stats) // 3
        live, points = 20_000 * MIB, []
        for u in range(0, 3 * blocks, 3):
            points.append(PeakPoint(f"forward {u}", live + self.implicit_bytes[u + 1], ((u + 1, 1),)))
            live += self.implicit_bytes[u]
            points.append(PeakPoint(f"forward {u}", live, ((u, 1), (u + 2, 1))))
        points.append(PeakPoint("loss", live + 1_000 * MIB))
        for u in range(3 * blocks - 3, -1, -3):
            points.append(PeakPoint(f"backward {u}", live + 1_000 * MIB, ((u, -1), (u + 2, -1))))
            points.append(PeakPoint(f"backward {u}", live, ((u + 1, -1),)))
            live -= self.implicit_bytes[u]
        return tuple(points)


def statistics(name: str, operators: Sequence[Operator]) -> SACModStats:
    """Operators as the SACEstimator would state them."""
    rows = tuple(
        SACOperator(op.name, i, op.ms, op.nbytes, op.nbytes == 0, False, None, False, ())
        for i, op in enumerate(operators)
    )
    groups = tuple(OperatorGroup((i,), False if row.view_like else None) for i, row in enumerate(rows))
    return SACModStats(module=name, region=0, operators=rows, groups=groups, implicit_bytes=0, boundary_bytes=0)


def problem_of(model: Model) -> GlobalProblem:
    """The global problem, with the curves of all units."""
    units = []
    for u, (stats, implicit) in enumerate(zip(model.stats, model.implicit_bytes, strict=True)):
        curve = tradeoff(stats.local_problem())
        units.append(
            GlobalUnit(
                name=stats.module,
                parent=-1 if u % 3 == 0 else u - u % 3,
                implicit_bytes=implicit,
                boundary_bytes=0,
                stored_bytes=curve.stored_bytes,
                discardable_bytes=curve.discardable_bytes,
                recompute_ms=curve.runtime_ms,
                segments=curves.tight_chords(curve.curve(), len(curve.points)),
            )
        )
    return GlobalProblem(units=tuple(units), points=model.points())


@dataclass(frozen=True, kw_only=True)
class Result:
    """One row of the table."""

    blocks: int
    method: str
    curves_s: float
    solve_s: float
    plan: Plan | None
    note: str = ""


def ours(model: Model, fraction: float, local: str) -> Result:
    """Curves, MILP and local policies, with cold caches."""
    for cached in (tradeoff, curves.tight_chords, local_solver(local)):
        cached.cache_clear()  # type: ignore[union-attr]
    start = time.perf_counter()
    problem = problem_of(model)
    items = [stats.local_problem() for stats in model.stats]
    budget_bytes = budget_of(problem, fraction)
    middle = time.perf_counter()
    found = solve_two_level(problem, items, budget_bytes, local=local)
    end = time.perf_counter()
    plan = [None if policy is None else policy.kept for policy in found.policies]
    return Result(
        blocks=len(items) // 3,
        method=local + (" + joint" if found.polished else ""),
        curves_s=middle - start,
        solve_s=end - middle,
        plan=plan,
    )


def upstream(model: Model, fraction: float, time_limit_s: float) -> Result:
    """PyTorch's tools on the same statistics."""
    import pulp
    from torch.distributed._tools import sac_ilp

    problem = problem_of(model)
    pytorch_tools.curve_of.cache_clear()
    start = time.perf_counter()
    for stats in model.stats:
        pytorch_tools.curve_of(stats.operators, stats.groups)
    middle = time.perf_counter()
    solver: Callable[..., Any] = functools.partial(pulp.PULP_CBC_CMD, gapRel=0.05, timeLimit=time_limit_s, msg=0)
    sac_ilp.PULP_CBC_CMD = lambda **_: solver()  # type: ignore[attr-defined]
    plan: Plan | None
    try:
        decisions = pytorch_tools.solve(problem, model.stats, budget_of(problem, fraction))
        plan = [
            pytorch_tools.kept_groups(stats, 1 - decisions[stats.module]) if stats.module in decisions else None
            for stats in model.stats
        ]
    except InfeasibleError:
        plan = None
    end = time.perf_counter()
    return Result(
        blocks=len(model.stats) // 3,
        method="torch _tools",
        curves_s=middle - start,
        solve_s=end - middle,
        plan=plan,
        note="no solution" if plan is None else "",
    )


def budget_of(problem: GlobalProblem, fraction: float) -> int:
    """A fraction of the peak without checkpointing."""
    return int(fraction * max(point.base_bytes for point in problem.points))


def report(model: Model, fraction: float, results: Sequence[Result]) -> None:
    """Print one row per result, all evaluated alike."""
    problem = problem_of(model)
    items = [stats.local_problem() for stats in model.stats]
    budget_bytes = budget_of(problem, fraction)
    bound_ms = joint_bound_ms(problem, items, budget_bytes)
    for result in results:
        head = f"{result.blocks:6d}  {result.method:<18s} {result.curves_s:9.2f} {result.solve_s:9.2f}"
        head += f" {result.curves_s + result.solve_s:9.2f}"
        if result.plan is None:
            print(f"{head}  {result.note}")
            continue
        kept_bytes = [
            None if kept is None else sum(local.items[i].memory_bytes for i in kept)
            for local, kept in zip(items, result.plan, strict=True)
        ]
        total_ms = recompute_ms(problem, items, result.plan)
        peak = problem.peaks_bytes(kept_bytes).max() / budget_bytes
        gap = relative_gap(total_ms, bound_ms)
        fits = "fits" if peak <= 1 else "EXCEEDS"
        print(f"{head} {total_ms:12.1f} {gap:8.2%} {peak:8.2%}  {fits}")


def main() -> None:
    """Parse the arguments, run, print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, nargs="+", default=[20, 80, 160])
    parser.add_argument("--budget", type=float, default=0.6, help="fraction of the peak without checkpointing")
    parser.add_argument("--upstream", action="store_true", help="run torch.distributed._tools, too")
    parser.add_argument("--time-limit", type=float, default=180.0, help="seconds, of upstream's MILP")
    args = parser.parse_args()
    print("blocks  method              curves s   solve s   total s recompute ms gap to LP peak/budget")
    for blocks in args.blocks:
        model = Model.of(blocks)
        results = [ours(model, args.budget, local) for local in ("greedy", "knapsack", "ilp")]
        if args.upstream:
            results.append(upstream(model, args.budget, args.time_limit))
        report(model, args.budget, results)


if __name__ == "__main__":
    try:
        main()
    except AutosacError as e:
        print(e, file=sys.stderr)
        sys.exit(e.exit_code)
