"""The table of versions: one row for each combination, from the results of its folders of tests."""

from __future__ import annotations

from benchmarks.matrix import Result, Row, folders_of, table

OLD, NEW = Row("2.14.1", "0.2.2", "3.11"), Row("2.15.0", "0.3.0", "3.13")


def test_the_table_sums_up_the_folders() -> None:
    """Counts are sums, the date is the oldest, "all" stands for every folder of the row, and failures are named."""
    everything = {name: Result("2026-01-02", 1, 0, ()) for name in folders_of(NEW)}
    some = {"fuzz": Result("2026-01-03", 2, 1, ("tests.fuzz::a",)), "bad_input": Result("2026-01-01", 5, 0, ())}
    assert table({OLD: some, NEW: everything}).splitlines()[2:] == [
        "| 2.15.0 | 0.3.0 | 3.13 | all | 1 | 0 | 0 | 2026-01-02 |",
        "| 2.14.1 | 0.2.2 | 3.11 | bad_input fuzz | 7 | 1 | 1 | 2026-01-01 |",
        "",
        "Failed:",
        "",
        "- torch 2.14.1 torchtitan 0.2.2 python 3.11: `tests.fuzz::a`",
    ]
