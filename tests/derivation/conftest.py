"""Jobs and models that are captured for real under many plans, and the comparison of traces operator by operator."""

from __future__ import annotations

import contextlib
import random
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from autosac.api import EagerCaptures
from autosac.capture.process.server import CaptureServer
from autosac.capture.record.log import in_order
from autosac.capture.request import TitanRequest
from autosac.induction import capturing, early_info
from autosac.jobs.titan import TitanCaptures, TitanJob
from autosac.planning.planner import Goal, Planner, plan_of
from autosac.planning.unit_policies import UnitPolicy
from autosac.plans import Plan, Unit
from autosac.simulation import Simulation, Target
from autosac.trace import Alloc, Collective, Free, Op, RecordStream, Trace, WorkWait

Rows = Callable[[Trace], list[Any]]


def _rows(trace: Trace) -> list[Any]:
    """Everything in a trace, by value: tables are looked up; storages, events and works are numbered as they appear.

    Frees of the prologue with nothing between them have no order (see `autosac.capture.record.log`).
    """
    numbers: dict[str, dict[int, int]] = {"storage": {}, "work": {}, "event": {}}

    def number(kind: str, value: int) -> int:
        return value if value < 0 else numbers[kind].setdefault(value, len(numbers[kind]))

    def row_of(row: Any) -> Any:
        changes: dict[str, Any] = {}
        if type(row) is Alloc:
            found = trace.storages[row.storage]
            number("storage", row.storage)
            return found._replace(module=trace.modules[found.module], source=trace.sources[found.source])
        if type(row) is Op or type(row) is Collective:
            changes = {
                "signature": trace.signatures[row.signature],
                "source": trace.sources[row.source],
                "inputs": tuple(number("storage", s) for s in row.inputs),
                "outputs": tuple(number("storage", s) for s in row.outputs),
            }
        if type(row) is Collective:
            changes |= {
                "group": trace.groups[row.group],
                "work": number("work", row.work),
                "batch": number("work", row.batch),
            }
        if type(row) is Free or type(row) is RecordStream:
            changes["storage"] = number("storage", row.storage)
        if type(row) is WorkWait:
            changes["work"] = number("work", row.work)
        if "event" in row._fields:
            changes["event"] = number("event", row.event)
        if "module" in row._fields:
            changes["module"] = trace.modules[row.module]
        return row._replace(**changes)

    return [*in_order(map(row_of, trace.prologue)), "the recorded step", *map(row_of, trace.events), trace.streams]


@pytest.fixture(scope="session")
def rows() -> Rows:
    """What two traces have to agree in to be the same, row by row."""
    return _rows


class Subject:
    """Something captured, with plans for it."""

    def __init__(self, captures: Any) -> None:
        self.captures = captures
        self.base: Simulation = captures.observed()
        self.planner = Planner(self.base, Goal(budget_bytes=1, budget_kind="active"))
        policies = self.planner.policies
        self.policies = policies.units
        self.outer = [u for u in self.policies if not any(policies.is_inside(u, other) for other in self.policies)]
        self.inner = [u for u in self.policies if not any(policies.is_inside(other, u) for other in self.policies)]
        self._known: dict[tuple[Unit, ...], Trace] = {}

    def captured(self, plan: Plan) -> Trace:
        """The trace that a real capture under the plan gives."""
        if plan.units not in self._known:
            self._known[plan.units] = self.captures.under(plan).trace
        return self._known[plan.units]

    def plan(self, units: Sequence[Unit]) -> Plan:
        """The plan with these units."""
        return plan_of(self.base, self.planner.goal, tuple(units))

    def plain(self, policies: Sequence[UnitPolicy]) -> Plan:
        """The plan in which these modules recompute everything."""
        return self.plan([policy.recompute_all() for policy in policies])

    def random(self, seed: int) -> Plan:
        """Some modules of some levels, each of which keeps what a coin decides, as far as that is free."""
        generator = random.Random(seed)
        share = generator.choice((0.2, 0.5, 0.9))
        chosen = []
        for policy in self.outer:
            inside = [u for u in self.inner if u.name.startswith(f"{policy.name}.")]
            chosen += generator.choice(([], [policy], [policy], [u for u in inside if generator.random() < 0.7]))
        units = []
        for policy in chosen:
            items = policy.sac.problem.items
            units.append(
                policy.keeping(
                    tuple(
                        i
                        for i, item in enumerate(items)
                        if (item.forced if item.forced is not None else generator.random() < share)
                    )
                )
            )
        return self.plan(units or [self.outer[0].recompute_all()])


# ---- eager models ---------------------------------------------------------------------------------------------------


class Attention(nn.Module):
    """Written out, with dropout on the weights. Keys and values are joined to empty caches, as Hugging Face's models do."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The mixed values."""
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        empty = [torch.tensor([], dtype=t.dtype, device=t.device) for t in (k, v)]
        k, v = (torch.cat([cache, t], dim=-2) for cache, t in zip(empty, (k, v), strict=True))
        weights = self.dropout(torch.softmax(q @ k.transpose(-1, -2) / 4, dim=-1))
        return self.out((weights @ v).transpose(1, 2).flatten(-2))


class InPlace(nn.Module):
    """A feed-forward network whose activation works in place."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The activated projections."""
        return F.relu(self.down(F.relu(self.up(x), inplace=True)), inplace=True)


class Block(nn.Module):
    """Both, with residuals."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention, self.ffn = Attention(width, 4), InPlace(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The block's output."""
        x = x + self.attention(self.norm1(x))
        return x + self.ffn(self.norm2(x))


def make_step(device: torch.device) -> tuple[nn.Module, Callable[[], Any]]:
    """Three blocks between an embedding and a head; two microbatches, whose gradients are added."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(300, 64)
            self.layers = nn.ModuleList(Block(64) for _ in range(3))
            self.head = nn.Linear(64, 300)

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            x = self.embedding(tokens)
            for layer in self.layers:
                x = layer(x)
            return self.head(x)

    with device:
        model = Model()
        tokens = torch.randint(0, 300, (4, 64))
    optimizer = torch.optim.AdamW(model.parameters())

    def step() -> None:
        losses = [F.cross_entropy(model(part).flatten(0, 1), part.flatten()) for part in tokens.chunk(2)]
        for loss in losses:
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return model, step


@pytest.fixture(scope="session")
def eager() -> Subject:
    """The eager model."""
    return Subject(EagerCaptures(make_step, Target.of("h100-sxm-80gb", 1)))


@torch.compile
def feed_forward(x: torch.Tensor, up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
    """Two products, between which a kernel runs."""
    return F.gelu(x @ up) @ down


class Calling(nn.Module):
    """Eager operators, then a compiled function."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(width), nn.Linear(width, width)
        self.up, self.down = (nn.Parameter(torch.randn(*shape)) for shape in ((width, 4 * width), (4 * width, width)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The output."""
        return x + feed_forward(self.linear(self.norm(x)).sigmoid(), self.up, self.down)


def make_calling_step(device: torch.device) -> Any:
    """Three blocks that call it."""
    model = nn.Sequential(*(Calling(128) for _ in range(3))).to(device)
    x = torch.randn(32, 64, 128, device=device)

    def step() -> None:
        model(x).square().mean().backward()
        model.zero_grad()

    return model, step


@pytest.fixture(scope="session")
def calling() -> Subject:
    """The eager model that calls a compiled function."""
    return Subject(EagerCaptures(make_calling_step, Target.of("h100-sxm-80gb", 1)))


class Pooled(nn.Module):
    """Channels-last images, pooled to one value of each channel (the mean becomes a view of other strides in place), after a
    batch norm, whose statistics a unit copies before they change.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv = nn.Sequential(nn.Conv2d(width, width, 3, padding=1), nn.BatchNorm2d(width), nn.Hardswish(True))
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.gate = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The images, each channel multiplied by its gate."""
        gate = self.gate(self.pool(self.conv(x)).flatten(1)).sigmoid()
        return x * gate[:, :, None, None]


class Routed(nn.Module):
    """Chosen experts' scores, divided by their sum in place after it was read, and a mask of the chosen ones."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.router, self.expert = nn.Linear(width, 8), nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The images, with what an expert makes of their means times the first score."""
        cache = torch.tensor([], device=x.device)
        count = torch.tensor(2).to(x.device)  # a number from the host, read beside what is empty
        means = torch.cat([cache, x.mean((2, 3))]) * count
        scale = torch.sqrt(torch.tensor(means.size(-1), dtype=torch.float) * 3)  # made on the host, one of the other
        means = self.expert(means) / scale
        means = means * torch.ones(means.shape, dtype=torch.bool, device=x.device) * means.new_ones(means.shape)
        logits = self.router(means)
        scores, chosen = logits.softmax(-1).topk(2, -1)
        scores /= scores.sum(-1, keepdim=True)
        mask = torch.zeros_like(logits).scatter_(1, chosen, 1.0)
        share = (logits.exp() * mask).sum(-1, keepdim=True)
        return x + (self.expert(means).relu() * scores[:, :1] * share)[:, :, None, None]


def make_image_step(device: torch.device) -> Any:
    """Three blocks of both, on images of 16 channels."""
    model = nn.Sequential(*(nn.Sequential(Pooled(16), Routed(16)) for _ in range(3))).to(device)
    model = model.to(memory_format=torch.channels_last)
    x = torch.randn(8, 16, 32, 32, device=device).contiguous(memory_format=torch.channels_last)

    def step() -> None:
        model(x).square().mean().backward()
        model.zero_grad()

    return model, step


@pytest.fixture(scope="session")
def images() -> Subject:
    """The model of images."""
    return Subject(EagerCaptures(make_image_step, Target.of("h100-sxm-80gb", 1)))


# ---- TorchTitan jobs ------------------------------------------------------------------------------------------------

JOBS = {
    "llama3, alone": ("llama3", "debugmodel", 1, ""),
    "llama3, FSDP of 8": ("llama3", "debugmodel", 8, ""),
    "llama3, TP of 2": ("llama3", "debugmodel", 2, "[parallelism]\ntensor_parallel_degree = 2\n"),
    "deepseek_v3, EP of 8": ("deepseek_v3", "debugmodel", 8, "[parallelism]\nexpert_parallel_degree = 8\n"),
    "deepseek_v3, flex attention": (
        "deepseek_v3",
        "debugmodel_flex_attn",
        8,
        "[parallelism]\nexpert_parallel_degree = 8\n",
    ),
    "gpt_oss, EP of 8": ("gpt_oss", "debugmodel", 8, "[parallelism]\nexpert_parallel_degree = 8\n"),
    "llama3, second of 3 stages": ("llama3", "debugmodel", 3, "[parallelism]\npipeline_parallel_degree = 3\n"),
}


class FewLayers(TitanJob):
    """Its model has four layers: of each kind some, with a plan and without."""

    def request(self, *words: Any, **options: Any) -> TitanRequest:
        """See `TitanJob.request`."""
        return replace(super().request(*words, **options), layers=4)


# They compile flexible attention by themselves: in a process of their own it is done once for all captures.
COMPILING = ("deepseek_v3, flex attention", "gpt_oss, EP of 8")


@pytest.fixture(scope="session", params=JOBS)
def titan(request: pytest.FixtureRequest, capture_server: CaptureServer) -> Iterator[Subject]:
    """One of the TorchTitan jobs."""
    model, flavor, world_size, parallelism = JOBS[request.param]
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "job.toml")
        file.write_text(
            f'[model]\nname = "{model}"\nflavor = "{flavor}"\n[training]\nlocal_batch_size = {max(2, world_size % 8)}\n'
            f"seq_len = 256\n{parallelism}"
        )
        job = TitanJob.of(str(file), gpu="h100-sxm-80gb", world_size=world_size)
        if "pipeline" in parallelism:
            job = job.stages(early_info(capturing(capture_server, job.request("none"))))[1]
        else:
            job = FewLayers(**{field.name: getattr(job, field.name) for field in fields(job)})
        with CaptureServer() if request.param in COMPILING else contextlib.nullcontext(capture_server) as server:
            captures = TitanCaptures(job, server, Path(folder))
            captures.start("none")
            captures.baselines()  # begun beside the first one
            yield Subject(captures)
