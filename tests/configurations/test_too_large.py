"""What cannot be made to fit, and what that rules out."""

from __future__ import annotations

from dataclasses import replace

from autosac.configurations.running.too_large import TooLarge, is_larger
from autosac.configurations.space.layout import Layout


def test_memory_grows_with_the_microbatch() -> None:
    """Accumulated gradients are in memory only where there is a second microbatch: such layouts are not compared."""
    one, two, four = (Layout(gpu="any", shard=2, microbatch=n, global_batch=8) for n in (1, 2, 4))
    assert is_larger(two, one) and not is_larger(one, two)
    assert not is_larger(four, two)


def test_what_needs_more_memory_than_another_layout() -> None:
    """Larger microbatches, more replicas and parameters that stay; not one shard, other degrees, or accumulation."""
    one = Layout(gpu="any", shard=8, tensor=2, microbatch=2, global_batch=16)
    assert is_larger(one, one)
    assert is_larger(replace(one, replicate=2, shard=4, reshard="never"), one)
    accumulating = replace(one, global_batch=64)
    assert is_larger(accumulating, replace(accumulating, microbatch=1))
    assert not is_larger(one, replace(one, reshard="never"))
    order = [replace(one, reshard=reshard) for reshard in ("always", "default", "never")]
    assert [[is_larger(a, b) for b in order] for a in order] == [[True, i > 0, i > 1] for i in range(3)]
    assert not is_larger(one, replace(one, replicate=2, shard=4))
    assert not is_larger(replace(one, replicate=8, shard=1), one)
    assert not is_larger(one, replace(one, microbatch=1))  # which accumulates gradients
    assert not is_larger(replace(one, tensor=1, shard=16), one)


def test_only_stages_of_the_same_layers_are_compared() -> None:
    """A balanced pipeline of larger microbatches may be cut in another way, which can fit though the smaller one did not."""
    one = Layout(gpu="any", shard=4, pipeline=2, split="balanced", microbatch=1, global_batch=32)
    stages = {one: (17, 15)}
    too_large = TooLarge(lambda layout: stages.get(layout, (16, 16)))
    too_large.note(one)
    two = replace(one, microbatch=2)
    assert not too_large.rules_out(two)
    stages[two] = (17, 15)
    assert too_large.rules_out(two)
    assert not too_large.rules_out(replace(one, replicate=1, shard=8, global_batch=64))
