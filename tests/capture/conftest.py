"""Small models that train for real on the CPU, as `make_step` functions, and captured traces to read."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from autosac.api import EagerCaptures
from autosac.capture.jobs.eager import EagerRequest, capture_eager
from autosac.plans import Plan
from autosac.simulation import Simulation, Target
from autosac.trace import Alloc, Collective, Event, Free, Label, Op, Phase, Signature, Trace

torch.set_num_threads(1)  # the models are too small for more to help
WIDTH, HEADS, VOCABULARY = 64, 4, 300


class LlamaBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)
        self.ffn_norm = nn.RMSNorm(WIDTH)
        self.gate = nn.Linear(WIDTH, 4 * WIDTH, bias=False)
        self.up = nn.Linear(WIDTH, 4 * WIDTH, bias=False)
        self.down = nn.Linear(4 * WIDTH, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, _ = x.shape
        qkv = self.qkv(self.attention_norm(x)).view(batch, length, 3, HEADS, WIDTH // HEADS)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, WIDTH))
        hidden = self.ffn_norm(x)
        return x + self.down(F.silu(self.gate(hidden)) * self.up(hidden))


class GPTBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, _ = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(batch, length, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        mixed = torch.softmax(q @ k.transpose(-1, -2) / 4, dim=-1) @ v
        x = x + self.dropout(self.out(mixed.transpose(1, 2).reshape(batch, length, WIDTH)))
        return x + self.dropout(self.down(F.gelu(self.up(self.norm2(x)))))


class InPlaceBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + F.relu(self.down(F.relu(self.up(x), inplace=True)), inplace=True)


class Model(nn.Module):
    def __init__(self, block: type[nn.Module]) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(block() for _ in range(3))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def make_step_of(block: type[nn.Module]) -> Callable[[torch.device], tuple[nn.Module, Callable[[], Any]]]:
    def make_step(device: torch.device) -> tuple[nn.Module, Callable[[], Any]]:
        torch.manual_seed(0)
        with device:
            model = Model(block)
            tokens = torch.randint(0, VOCABULARY, (8, 128))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

        def step() -> None:
            loss = F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()

        return model, step

    return make_step


MAKERS = {
    "llama": make_step_of(LlamaBlock),
    "gpt with dropout": make_step_of(GPTBlock),
    "in-place": make_step_of(InPlaceBlock),
}


class RememberedCaptures(EagerCaptures):
    """Captures with this machine's CPU as the target, each plan's once."""

    def __init__(self, make_step: Any) -> None:
        super().__init__(make_step, Target.of("h100-sxm-80gb", 1), target="cpu")
        self._known: dict[str, Simulation] = {}

    def under(self, plan: Plan) -> Simulation:
        """The step under a plan."""
        key = repr(plan)
        if key not in self._known:
            self._known[key] = super().under(plan)
        return self._known[key]


_captures: dict[str, RememberedCaptures] = {}


@pytest.fixture(params=list(MAKERS), scope="module")
def model_name(request: pytest.FixtureRequest) -> str:
    """The name of one of the small models."""
    return str(request.param)


@pytest.fixture(scope="module")
def make_step(model_name: str) -> Any:
    """One of the small models."""
    return MAKERS[model_name]


@pytest.fixture(scope="module")
def cpu_captures(model_name: str) -> RememberedCaptures:
    """The captures of that model, shared by all tests."""
    return _captures.setdefault(model_name, RememberedCaptures(MAKERS[model_name]))


@pytest.fixture
def llama_step() -> Any:
    """The small Llama."""
    return MAKERS["llama"]


class Reading:
    """A captured trace in a form that expectations can be written in."""

    def __init__(self, trace: Trace) -> None:
        self.trace = trace

    def name(self, event: Op | Collective) -> str:
        """``aten.mm.default`` as ``mm``."""
        return self.trace.signatures[event.signature].name.split(".")[1]

    def operators(self, name: str | None = None, phase: Phase | None = None) -> list[Op]:
        """The operators that launch something, of one name or phase."""
        return [
            event
            for _, event in self.trace.operators()
            if not self.trace.signatures[event.signature].is_view
            and (name is None or self.name(event) == name)
            and (phase is None or event.phase is phase)
        ]

    def placed(self) -> list[tuple[str, str, str]]:
        """(phase, module, name) of all operators that launch something."""
        return [(o.phase.name.lower(), self.trace.modules[o.module], self.name(o)) for o in self.operators()]

    def collectives(self, kind: str | None = None) -> list[Collective]:
        """The collectives of a kind."""
        return [e for e in self.trace.events if type(e) is Collective and kind in (None, e.kind)]

    def signature(self, event: Op | Collective) -> Signature:
        """What the operator was called with."""
        return self.trace.signatures[event.signature]

    def of(self, *kinds: type) -> list[Event]:
        """The events of these types."""
        return [event for event in self.trace.events if type(event) in kinds]

    def life(self, storage: int) -> tuple[int, int]:
        """The indices of its allocation and of its release (the end if there is none)."""
        marks = [(type(event), event[0]) for event in self.trace.events]
        end = marks.index((Free, storage)) if (Free, storage) in marks else len(marks)
        return marks.index((Alloc, storage)), end

    def peak_bytes(self) -> int:
        """The most bytes that are alive at once in the step."""
        present = peak = sum(self.trace.storages[s].nbytes for s in self.trace.residents())
        for event in self.trace.events:
            if type(event) is Alloc:
                present += self.trace.storages[event.storage].nbytes
                peak = max(peak, present)
            elif type(event) is Free:
                present -= self.trace.storages[event.storage].nbytes
        return peak

    def labelled(self, label: Label, storages: Iterable[int] | None = None) -> list[int]:
        """Bytes of the storages with a label, those resident at the step's beginning unless others are given."""
        chosen = self.trace.residents() if storages is None else storages
        return [self.trace.storages[s].nbytes for s in chosen if self.trace.storages[s].label is label]


@pytest.fixture(scope="module")
def capture() -> Callable[..., Reading]:
    """Captures an eager step (with the arguments of its request) in a child process."""

    def run(make_step: Any, **request: Any) -> Reading:
        return Reading(capture_eager(make_step, EagerRequest(**request)))

    return run


@pytest.fixture
def interruptible() -> Iterator[None]:
    """Processes that a shell starts in the background ignore interrupts, and so would their children."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)
