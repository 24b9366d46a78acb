"""Which folder `--truth` names."""

from __future__ import annotations

from pathlib import Path

from benchmarks.truth import truth_folder


def test_the_folder_itself_or_the_one_above_it(tmp_path: Path) -> None:
    """The kind's own folder is found from above; where there is none, the given one holds the files."""
    (tmp_path / "truth").mkdir()
    assert truth_folder("truth")(str(tmp_path)) == truth_folder("truth")(str(tmp_path / "truth")) == tmp_path / "truth"
    assert truth_folder("traces")(str(tmp_path)) == tmp_path
