"""What GPUs a search may use: so many of a kind, at a price."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from autosac.errors import UsageError
from autosac.limits import MOST_GPUS, parse_whole

_MOST_PRICE = 1e9
Objective = Literal["tokens-per-second", "cost-per-token"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Offer:
    """GPUs of one kind that a search may use.

    Attributes:
        gpu: the name of a known GPU, or the path of a profile.
        world_size: how many of them.
        cluster: the name of a known cluster, or the path of a profile; None: the usual one of the GPU.
        price: of one GPU per hour, in any currency; 0 if not said.
    """

    gpu: str
    world_size: int = 1
    cluster: str | None = None
    price: float = 0.0

    def __post_init__(self) -> None:
        if not 1 <= self.world_size <= MOST_GPUS:
            raise UsageError(f"{self.world_size} x {self.gpu}: expected 1 to {MOST_GPUS:,} GPUs")
        if not 0 <= self.price < _MOST_PRICE:
            raise UsageError(f"price {self.price} of {self.gpu}: expected 0 or more")

    def weight(self, objective: Objective) -> float:
        """What a millisecond of a step counts: 1, or what it costs on all GPUs."""
        return 1.0 if objective == "tokens-per-second" else self.price * self.world_size / 3.6e6


def check_offers(offers: Sequence[Offer], objective: Objective) -> None:
    """UsageError if nothing is offered, something twice, or without a price where prices decide."""
    if not offers:
        raise UsageError("offers: name the GPUs to choose from, such as Offer(gpu='h100-sxm-80gb', world_size=8)")
    names = [offer.gpu for offer in offers]
    twice = [name for name in names if names.count(name) > 1]
    if twice:
        raise UsageError(f"{twice[0]} is offered twice: search for each number of GPUs on its own")
    unpriced = [offer.gpu for offer in offers if not offer.price]
    if objective == "cost-per-token" and unpriced:
        raise UsageError(
            f"objective cost-per-token needs the price of one {unpriced[0]} per hour (--price {unpriced[0]}=PRICE)"
        )


def offers_of(gpus: str, prices: Sequence[str]) -> tuple[Offer, ...]:
    """The offers of ``--gpus NAME:COUNT,...`` with ``--price NAME=PRICE``. UsageError for what is wrong or missing."""
    found: dict[str, int] = {}
    for text in gpus.split(","):
        name, colon, count_text = text.strip().rpartition(":")
        count = parse_whole(count_text, 1, MOST_GPUS)
        if not (name and colon) or count is None:
            raise UsageError(f"--gpus {text.strip()!r}: expected NAME:COUNT, such as h100-sxm-80gb:128")
        if name in found:
            raise UsageError(f"--gpus: {name} is given twice")
        found[name] = count
    priced = _prices(prices)
    for name in priced:
        if name not in found:
            raise UsageError(f"--price {name}: there are no such GPUs among {', '.join(found)}")
    return tuple(Offer(gpu=name, world_size=count, price=priced.get(name, 0.0)) for name, count in found.items())


def _prices(texts: Sequence[str]) -> dict[str, float]:
    found: dict[str, float] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        try:
            price = float(value)
        except ValueError:
            price = -1.0
        if not (name and equals) or not 0 < price < _MOST_PRICE:
            raise UsageError(f"--price {text!r}: expected NAME=PRICE with a price above 0, such as h100-sxm-80gb=2.5")
        if name in found:
            raise UsageError(f"--price: {name} is given twice")
        found[name] = price
    return found
