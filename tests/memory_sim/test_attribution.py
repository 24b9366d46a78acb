"""Who holds the memory, by modules: shares worked out by hand."""

from __future__ import annotations

from autosac.memory_sim.attribution import ModuleShare, module_shares
from traces import trace_of

MODULES = ("layers", "layers.0", "layers.0.attention", "layers.1", "head")


def test_a_modules_bytes_count_for_all_above_it() -> None:
    """Five modules without a root among them: each has what it made and what those below made, the root (no module) all."""
    trace = trace_of(modules=MODULES)
    assert module_shares(trace, {-1: 1, 0: 2, 2: 30, 3: 500, 4: 4000}) == (
        ModuleShare("", 1, 4533),
        ModuleShare("head", 4000, 4000),
        ModuleShare("layers", 2, 532),
        ModuleShare("layers.1", 500, 500),
        ModuleShare("layers.0", 0, 30),
        ModuleShare("layers.0.attention", 30, 30),
    )


def test_the_root_and_no_module_are_one() -> None:
    """A trace whose first module is the root: its bytes and those of no module add up."""
    trace = trace_of(modules=("", "head"))
    assert module_shares(trace, {-1: 3, 0: 4, 1: 5}) == (ModuleShare("", 7, 12), ModuleShare("head", 5, 5))


def test_equal_shares_are_in_the_order_of_names() -> None:
    """Nothing held is no share at all."""
    trace = trace_of(modules=("", "b", "a"))
    shares = module_shares(trace, {1: 8, 2: 8})
    assert [(share.module, share.subtree_bytes) for share in shares] == [("", 16), ("a", 8), ("b", 8)]
    assert module_shares(trace, {}) == ()
