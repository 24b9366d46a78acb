"""Whether compiled modules save what their plan states, and have the gradients of no plan: random models, on the CPU.

    python -m benchmarks.compiled_kept [--models 4] [--plans 3] [--seed 1] [--pipelines]

A model is a row of small blocks (`blocks`), each compiled by itself; length, batch and vocabulary are random. Plans give each
block one of the policies that the planner proposes for it. The step under a plan is captured; what the plan then states of
each block (`autosac.planning.compiled_costs.as_executed`) is compared, to the byte, with what the block saves in a real step
(`real`), and its gradients with those without a plan, bit by bit. Ends with 1 if any of that differs. Blocks that save more
under a policy than without are listed, but not wrong: the planner measures them, and does not choose such a policy. With
`--pipelines`, plans of compiled pipelines instead (`pipelines`).
"""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional as F

import autosac
from autosac.api import EagerCaptures
from autosac.planning.closed_loop import Goal, planner_for
from autosac.planning.compiled_costs import as_executed
from autosac.planning.compiled_policies import groups_of
from autosac.planning.planner import plan_of
from autosac.planning.traced import as_traced
from autosac.plans import Plan, Unit
from autosac.simulation import Target
from benchmarks.compiled_kept import pipelines
from benchmarks.compiled_kept.blocks import KINDS, Model
from benchmarks.compiled_kept.real import Counting


@dataclass(frozen=True, kw_only=True)
class Step:
    """A model and its batch."""

    kinds: tuple[type[torch.nn.Module], ...]
    batch: int
    length: int
    vocabulary: int
    tied: bool

    @staticmethod
    def of(seed: int) -> Step:
        """A random one."""
        draw = random.Random(seed)
        return Step(
            kinds=tuple(draw.sample(KINDS, len(KINDS))),
            batch=draw.choice((1, 2, 3)),
            length=draw.choice((32, 40, 64)),
            vocabulary=draw.choice((96, 128)),
            tied=draw.random() < 0.5,
        )

    @property
    def names(self) -> list[str]:
        """Its blocks."""
        return [f"layers.{i}" for i in range(len(self.kinds))]

    def model(self) -> Model:
        """With the same weights each time."""
        torch.manual_seed(0)
        return Model(self.kinds, self.vocabulary, tied=self.tied)

    def make_step(self, device: torch.device) -> Any:
        """For `autosac.plan`."""
        model = self.model().to(device)
        for layer in model.layers:
            layer.compile()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        tokens = torch.zeros(self.batch, self.length, dtype=torch.int64, device=device)

        def step() -> None:
            F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten()).backward()
            optimizer.step()
            optimizer.zero_grad()

        return model, step

    def run(self, plan: Plan | None) -> tuple[dict[str, int], list[torch.Tensor]]:
        """What each block really saves; the loss and all gradients."""
        torch._dynamo.reset()
        model = self.model()
        if plan is not None:
            autosac.apply(model, plan)
        counting = Counting(model, self.names)
        torch.manual_seed(1)
        tokens = torch.randint(self.vocabulary, (self.batch, self.length))
        loss = F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
        loss.backward()
        return counting.saved_bytes, [loss.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]


@dataclass(frozen=True, kw_only=True)
class Row:
    """One block under one policy."""

    kind: str
    policy: str
    stated_bytes: int
    saved_bytes: int
    alone_bytes: int
    is_same: bool

    @property
    def wrong(self) -> str:
        """What is wrong; "" if nothing is."""
        wrong = ["other bytes"] * (self.stated_bytes != self.saved_bytes) + ["other gradients"] * (not self.is_same)
        return ", ".join(wrong)

    @property
    def notable(self) -> str:
        """What is wrong, or worth a line."""
        return self.wrong or "more than without a plan" * (self.saved_bytes > self.alone_bytes)


def trial(step: Step, seed: int, plans: int) -> list[Row]:
    """One model under so many plans."""
    draw = random.Random(seed)
    captures = EagerCaptures(step.make_step, Target.of("h100-sxm-80gb", 1))
    observed, none = captures.observed(), captures.baselines()["none"]
    goal, traced = Goal(budget_bytes=2**40), captures.traced()
    groups = groups_of(planner_for(observed, none, goal).policies, none.trace)
    alone, gradients = step.run(None)
    rows = []
    for number in range(plans):
        policies = {unit.name: draw.choice(group.policies[1:]) for group in groups for unit in group.units}
        made = [policies[unit.name].of(unit) for group in groups for unit in group.units]
        units = tuple(as_traced(unit, traced.get(unit.fqn, ())) for unit in made if isinstance(unit, Unit))
        plan = plan_of(observed, goal, units)
        stated = as_executed(plan, captures.under(plan), none)
        saved, found = step.run(plan)
        is_same = len(found) == len(gradients) and all(map(torch.equal, found, gradients))
        print(f"model {seed}, plan {number}: gradients {'equal' if is_same else 'differ'}", file=sys.stderr)
        rows += [
            Row(
                kind=step.kinds[step.names.index(unit.fqn)].__name__,
                policy=policies[unit.fqn].name,
                stated_bytes=unit.kept_bytes,
                saved_bytes=saved[unit.fqn],
                alone_bytes=alone[unit.fqn],
                is_same=is_same,
            )
            for unit in stated.units
        ]
    return rows


def table(rows: Sequence[Row]) -> str:
    """What is notable, and how many are right."""
    lines = [
        f"{row.kind:12} {row.policy:22} states {row.stated_bytes:9,} saves {row.saved_bytes:9,} "
        f"alone {row.alone_bytes:9,}: {row.notable}"
        for row in rows
        if row.notable
    ]
    right = sum(not row.wrong for row in rows)
    return "\n".join([*lines, f"{right} of {len(rows)} blocks under plans save what is stated, gradients bit for bit"])


def main(argv: Sequence[str]) -> int:
    """Parse, run, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", type=int, default=4)
    parser.add_argument("--plans", type=int, default=3)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--pipelines", action="store_true")
    options = parser.parse_args(argv)
    if options.pipelines:
        staged = [row for schedule in pipelines.SCHEDULES for row in pipelines.rows_of(schedule)]
        print(pipelines.table(staged))
        return int(not all(row.is_right for row in staged))
    rows = [
        row for i in range(options.models) for row in trial(Step.of(options.seed + i), options.seed + i, options.plans)
    ]
    print(table(rows))
    return int(any(row.wrong for row in rows))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
