"""Small blocks that differ in what their backward needs: each takes and returns (batch, length, width)."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

WIDTH = 64
_HEADS = 4


class Feedforward(nn.Module):
    """Two products with biases around an activation."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """With a residual."""
        return x + self.down(F.gelu(self.up(x)))


class Dropped(Feedforward):
    """With dropout."""

    def forward(self, x: Tensor) -> Tensor:
        """With a residual."""
        return x + F.dropout(self.down(F.relu(self.up(x))), 0.1)


class Gated(nn.Module):
    """Three products and an RMS norm."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(WIDTH)
        self.gate, self.up = (nn.Linear(WIDTH, 2 * WIDTH, bias=False) for _ in range(2))
        self.down = nn.Linear(2 * WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """With a residual."""
        normed = self.norm(x)
        return x + self.down(F.silu(self.gate(normed)) * self.up(normed))


class Attention(nn.Module):
    """A fused projection, of which queries, keys and values are views, and attention written out: fused kernels of a GPU and
    of a CPU save different results.
    """

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """With a residual."""
        batch, length, _ = x.shape
        q, k, v = self.qkv(self.norm(x)).view(batch, length, 3, _HEADS, -1).permute(2, 0, 3, 1, 4)
        attended = (q @ k.transpose(-1, -2) * 0.3).tanh().softmax(-1) @ v  # no pattern that the compiler knows
        return x + self.out(attended.transpose(1, 2).reshape(x.shape))


class Shared(nn.Module):
    """A weight that is used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.twice, self.once = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """A sum of both."""
        return torch.tanh(self.twice(torch.tanh(self.twice(x)))) + self.once(x)


class Sliced(nn.Module):
    """Slices of one product, of which half is used by nobody."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """With a residual."""
        wide = self.up(x)
        return x + self.down(torch.sigmoid(wide[..., :WIDTH]) * wide[..., WIDTH : 2 * WIDTH])


class Convolved(nn.Module):
    """Convolutions around a group norm."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv1d(WIDTH, WIDTH, 3, padding=1), nn.Conv1d(WIDTH, WIDTH, 1)
        self.norm = nn.GroupNorm(4, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """With a residual."""
        return x + self.second(F.silu(self.norm(self.first(x.transpose(1, 2))))).transpose(1, 2)


class Normed(nn.Module):
    """A batch norm, which changes its buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.product, self.norm = nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """With a residual."""
        return x + F.relu(self.norm(self.product(x).transpose(1, 2))).transpose(1, 2)


class Sines(nn.Module):
    """Products under sines, whose backwards need all of them."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList([nn.Parameter(torch.randn(WIDTH, WIDTH) / 8) for _ in range(4)])

    def forward(self, x: Tensor) -> Tensor:
        """One after the other."""
        for weight in self.weights:
            x = (x @ weight).sin()
        return x


class Products(nn.Module):
    """Products only: the last is the result, which no backward needs."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        """One after the other."""
        return self.second(self.first(x))


class Reduced(nn.Module):
    """Softmax, powers and a maximum with its positions."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """A sum."""
        return x * self.second(F.softmax(self.first(x), -1)).pow(2) + x.abs().max(-1, keepdim=True).values


class Returned(nn.Module):
    """A product that its own backward needs and that is added to the result."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.first, self.second = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """A sum."""
        y = self.first(self.norm(x))
        return torch.sigmoid(self.second(torch.relu(y)) + y)


class Spread(nn.Module):
    """A mean that is spread over all positions, without memory of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """A product."""
        return x + self.second(x * self.first(x).mean(1, keepdim=True).expand_as(x))


class Embedded(nn.Module):
    """Positions with an embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.places, self.product = nn.Embedding(512, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """With a residual."""
        return x + self.product(F.elu(x + self.places(torch.arange(x.shape[1], device=x.device))))


KINDS: tuple[type[nn.Module], ...] = (
    Feedforward,
    Dropped,
    Gated,
    Attention,
    Shared,
    Sliced,
    Convolved,
    Normed,
    Sines,
    Products,
    Reduced,
    Returned,
    Spread,
    Embedded,
)


class Model(nn.Module):
    """Layers between an embedding and a projection, which may share their weight."""

    def __init__(self, kinds: tuple[type[nn.Module], ...], vocabulary: int, *, tied: bool) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, WIDTH)
        self.layers = nn.ModuleList([kind() for kind in kinds])
        self.head = nn.Linear(WIDTH, vocabulary, bias=False)
        if tied:
            self.head.weight = self.tokens.weight

    def forward(self, tokens: Tensor) -> Tensor:
        """The logits."""
        x = self.tokens(tokens)
        for layer in self.layers:
            x = layer(x)
        logits: Tensor = self.head(x)
        return logits
