"""Recurrent networks, whose CPU forms chain in-place operators and unsafe splits."""

from __future__ import annotations

import random
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from benchmarks.fuzz.family import Job, family


class _Recurrent(nn.Module):
    def __init__(self, kind: Any, width: int, **options: Any) -> None:
        super().__init__()
        self.rnn = kind(width, width, batch_first=True, **options)
        self.out = nn.Linear(self.rnn.hidden_size * (2 if self.rnn.bidirectional else 1), width)

    def forward(self, x: Tensor) -> Tensor:
        h, _ = self.rnn(x)
        return x + self.out(h)


class _Sequence(nn.Module):
    def __init__(self, blocks: list[nn.Module], width: int) -> None:
        super().__init__()
        self.first, self.blocks = nn.Linear(width, width), nn.ModuleList(blocks)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return x


def _job(rng: random.Random, make: Any, width: int, parts: bool = True) -> Job:
    count = rng.randint(1, 2)
    units = [f"blocks.{i}" for i in range(count)]
    if parts and rng.random() < 0.4:
        units = [f"{name}.rnn" for name in units]
    return Job(
        _Sequence([make() for _ in range(count)], width),
        tuple(units),
        lambda rows: (torch.randn(max(2, rows // 4), 4, width),),
    )


def _options(rng: random.Random) -> dict[str, Any]:
    layers = rng.choice((1, 2))
    dropout = rng.choice((0.0, 0.3)) if layers > 1 else 0.0
    return {"num_layers": layers, "bidirectional": rng.random() < 0.5, "dropout": dropout, "bias": rng.random() < 0.8}


@family("rnn", "nn.RNN with tanh or ReLU: one or two layers, one or two directions, dropout")
def rnn(rng: random.Random) -> Job:
    """Blocks with nn.RNN."""
    options = {**_options(rng), "nonlinearity": rng.choice(("tanh", "relu"))}
    return _job(rng, lambda: _Recurrent(nn.RNN, 6, **options), 6)


@family("gru", "nn.GRU: one or two layers, one or two directions, dropout")
def gru(rng: random.Random) -> Job:
    """Blocks with nn.GRU."""
    options = _options(rng)
    return _job(rng, lambda: _Recurrent(nn.GRU, 6, **options), 6)


@family("lstm", "nn.LSTM: one or two layers, one or two directions, dropout, projections")
def lstm(rng: random.Random) -> Job:
    """Blocks with nn.LSTM."""
    options = _options(rng)
    return _job(rng, lambda: _Recurrent(nn.LSTM, 6, **options), 6)


@family("cells", "loops over LSTMCell, GRUCell and RNNCell")
def cells(rng: random.Random) -> Job:
    """Blocks that call a cell once per time step."""
    kind = rng.choice((nn.LSTMCell, nn.GRUCell, nn.RNNCell))

    class Loop(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cell = kind(6, 6)

        def forward(self, x: Tensor) -> Tensor:
            state, outs = None, []
            for t in range(x.shape[1]):
                state = self.cell(x[:, t], state)
                outs.append(state[0] if isinstance(state, tuple) else state)
            return x + torch.stack(outs, 1)

    return _job(rng, Loop, 6, parts=False)


@family("packed_sequence", "a packed sequence through a GRU", planner=False)
def packed_sequence(rng: random.Random) -> Job:
    """Blocks that pack, run and pad."""

    class Packed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rnn = nn.GRU(6, 6, batch_first=True)

        def forward(self, x: Tensor) -> Tensor:
            lengths = torch.arange(x.shape[0]) % x.shape[1] + 1
            packed = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
            out, _ = pad_packed_sequence(self.rnn(packed)[0], batch_first=True, total_length=x.shape[1])
            return x + out

    return _job(rng, Packed, 6, parts=rng.random() < 0.5)


class _Carrying(nn.Module):
    """A GRU that carries its state from step to step (truncated backpropagation through time)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.rnn = nn.GRU(width, width, batch_first=True)
        self.hidden: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.hidden
        if hidden is not None and (hidden.shape[1] != x.shape[0] or hidden.dtype != x.dtype):
            hidden = None
        out, state = self.rnn(x, hidden)
        self.hidden = state.detach()
        return x + out


@family("carried_state", "a recurrent network that carries its hidden state from step to step in an attribute")
def carried_state(rng: random.Random) -> Job:
    """Stateful recurrence."""
    return _job(rng, lambda: _Carrying(6), 6, parts=False)
