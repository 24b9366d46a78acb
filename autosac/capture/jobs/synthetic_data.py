"""What a TorchTitan job trains on in a capture: no files, random tokens of the job's shape."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch


class SyntheticTokenizer:
    """Stands in for the tokenizer: the job's vocabulary without its files."""

    eos_id = bos_id = 0
    pad_id = -1

    def __init__(self, vocabulary_size: int) -> None:
        self._vocabulary_size = vocabulary_size

    def get_vocab_size(self) -> int:
        return self._vocabulary_size

    def encode(self, *_: Any, **__: Any) -> list[int]:
        return [1]


class SyntheticLoader:
    """Random token batches of the job's shape, on the CPU as TorchTitan's loaders yield them."""

    def __init__(self, batch_size: int, seq_len: int, vocabulary_size: int) -> None:
        self.batch_size, self.seq_len, self.vocabulary_size = batch_size, seq_len, vocabulary_size

    def __iter__(self) -> Iterator[tuple[dict[str, torch.Tensor], torch.Tensor]]:
        generator = torch.Generator().manual_seed(0)
        while True:
            tokens = torch.randint(1, self.vocabulary_size, (self.batch_size, self.seq_len + 1), generator=generator)
            yield self.inputs(tokens[:, :-1]), tokens[:, 1:]

    def inputs(self, tokens: torch.Tensor) -> dict[str, torch.Tensor]:
        """What the model is given."""
        return {"input": tokens}
