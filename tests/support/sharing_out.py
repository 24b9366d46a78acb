"""How tests are shared out among pytest-xdist's workers: a file's tests go to one worker, and so do those of files that use
the same captures, so that what they share is made once. What takes longest begins first, and what is short fills the end.

`tests/conftest.py` imports this as ``sharing_out`` (see `pythonpath` in pyproject.toml).
"""

from __future__ import annotations

from xdist.scheduler import LoadScopeScheduling

# Groups of files, below tests/, by how long they take, longest first: a file, or files with the same captures.
LONGEST = (
    ("end_to_end/test_plan.py", "end_to_end/test_confidence.py", "end_to_end/test_batch_size.py"),
    ("capture/test_layers.py", "capture/test_fusion.py", "planning/test_compiled_mixes.py"),
    ("derivation",),
    ("scripts",),  # processes to fork from, and what the compiler has written
    ("docs/test_examples.py",),  # some of its captures are those of test_plan.py, which has kept them by then
    ("end_to_end/test_plans.py", "end_to_end/test_golden.py"),
    ("end_to_end/test_collectives.py", "end_to_end/test_bad_combinations.py", "invariants"),
    ("integrations/test_torchtitan.py",),
    ("capture/test_compiled_steps.py",),
    ("capture/test_cpu_truth.py", "capture/test_plans_of_solvers.py"),
    ("capture/test_inductor.py",),
    ("capture/test_hosts.py",),
    ("capture/test_titan.py",),
)


def group_of(nodeid: str) -> str:
    """The name of the group that a test belongs to: its file, or the first file or folder of its group above."""
    file = nodeid.partition("::")[0].rpartition("tests/")[2]
    for group in LONGEST:
        if any(file == part or file.startswith(f"{part}/") for part in group):
            return group[0]
    return file


def rank(nodeid: str) -> int:
    """The place of a test's group: those that are not listed come last, in their own order."""
    names = [group[0] for group in LONGEST]
    group = group_of(nodeid)
    return names.index(group) if group in names else len(names)


class ByGroup(LoadScopeScheduling):
    """Gives a worker the next group as soon as it has nearly finished its own."""

    def _split_scope(self, nodeid: str) -> str:
        return group_of(nodeid)
