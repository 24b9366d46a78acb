"""What the pages say of the code is so: messages, rooms, options, pictures."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from autosac.cli.parser import build_parser
from autosac.memory_sim.allocator_config import AllocatorConfig

from .conftest import DOCS, PAGES, ROOT

sys.path.insert(0, str(DOCS / "pictures"))
import concepts
import house

HEADINGS = re.findall(r"^### `(.+)`$", (DOCS / "troubleshooting.md").read_text(), re.MULTILINE)


def texts() -> Iterator[str]:
    """Every string of the package but docstrings, with ... for what is filled in."""
    for path in house.modules().values():
        tree = ast.parse(path.read_text(encoding="utf-8"))
        docstrings = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
        for node in ast.walk(tree):
            if id(node) in docstrings:
                continue
            if isinstance(node, ast.JoinedStr):
                yield "".join(part.value if isinstance(part, ast.Constant) else "..." for part in node.values)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield node.value


@pytest.fixture(scope="module")
def strings() -> tuple[str, ...]:
    """All of `texts`."""
    return tuple(texts())


@pytest.mark.parametrize("heading", HEADINGS)
def test_a_message_of_the_troubleshooting_page_is_in_the_code(heading: str, strings: tuple[str, ...]) -> None:
    """Its fixed words stand in one string of the code, in this order."""
    pattern = ".*".join(map(re.escape, heading.split("...")))
    assert any(re.search(pattern, text, re.DOTALL) for text in strings)


def test_every_room_is_described() -> None:
    """The tables of the architecture page have a row for each room, and no others."""
    page = (DOCS / "architecture.md").read_text()
    rooms = {house.room(module) for module in house.modules()}
    rooms |= {house.inner_room(hall, module) for hall in house.HALLS for module in house.modules()}
    assert set(re.findall(r"^\| `([\w.]+)` \|", page, re.MULTILINE)) == rooms - {None}


def test_options_that_pages_name_exist(capsys: pytest.CaptureFixture[str]) -> None:
    """Every ``--option`` in code on a page is one of autosac, or is listed here with the tool that it belongs to."""
    others = {
        "--module", "--config", "--job", "--nproc-per-node",  # TorchTitan, torchrun
        "--trials", "--seed", "--truth", "--measured", "--profile", "--stages", "--captures",
    "--growth", "--out", "--only",  # benchmarks
        "--again", "--files", "--list", "--mutants", "--limit", "--quick", "--tables", "--table", "--exhaustive",  # benchmarks
        "--examples", "--covered", "--calibrated", "--csv", "--check", "--gpt", "--cold", "--commands",  # benchmarks
        "--no-deps", "--no-index", "--target", "--only-binary", "--python-version", "--platform", "--durations",  # pip, pytest
        "--splits", "--small", "--polish", "--unseen", "--held-out", "--repeat", "--page", "--data", "--full-precision",
        "--plans", "--casts", "--shards", "--slow-products", "--pipelines", "--on", "--family", "--compiled",  # benchmarks
        "--frontend", "--fit", "--phase", "--all",  # benchmarks
        "--help", "--version", "--its", "--own", "--arguments",  # any program
    }  # fmt: skip
    known = set(others)
    for command in re.findall(r"^    ([a-z]+)(?: |$)", build_parser().format_help(), re.MULTILINE):
        with pytest.raises(SystemExit):
            build_parser().parse_args([command, "--help"])
        known |= set(re.findall(r"--[a-z][a-z-]+", capsys.readouterr().out))
    named = {
        option
        for page in PAGES
        for code in re.findall(r"`[^`\n]+`|^\$ .+$|^    .+$", PAGES[page].read_text(), re.MULTILINE)
        for option in re.findall(r"(?<![\w-])--[a-z][a-z-]+(?![\w.]*\.)", code)
    }
    assert named <= known


def test_pages_link_to_files_that_exist() -> None:
    """Relative links and pictures of the README, of CONTRIBUTING and of every page."""
    for path in (*PAGES.values(), ROOT / "tests/README.md"):
        for target in re.findall(r"\]\(([^)#\s]+)[^)]*\)", path.read_text()):
            if "://" not in target and "_generated" not in target:
                assert (path.parent / target).exists(), f"{path}: {target}"


def test_the_figures_at_the_top_of_the_accuracy_page_are_those_of_the_tables() -> None:
    """So is what the FAQ says of the H100 study."""
    accuracy = (DOCS / "accuracy.md").read_text()
    page = accuracy + (DOCS / "published.md").read_text()

    def printed(pattern: str) -> tuple[str, ...]:
        found = re.search(pattern, page, re.MULTILINE)
        assert found is not None, pattern
        return tuple(text if "of" in text else f"{float(text):.1f}" for text in found.groups())

    study = printed(r"^all +23 .*?\) +([\d.]+)% \( *([\d.]+)%\) +([\d.]+)% \( *([\d.]+)%\)$")
    memory, throughput = (
        printed(r"^reserved memory: mean error ([\d.]+)%"),
        printed(r"^throughput: mean error ([\d.]+)%"),
    )
    top, faq = accuracy.split("Every table")[0], (DOCS / "faq.md").read_text()
    assert f"off by {study[0]} % on average, that of 26 published TorchTitan runs by {memory[0]} %" in top
    assert f"{printed('^out of memory or not: (.+) outcomes right$')[0]} outcomes are right" in top
    assert f"{study[2]} % off on average on a measured H100, {throughput[0]} % over 38 published TorchTitan runs" in top
    words = " ".join(faq.split())
    assert f"reserved memory was off by {study[0]} % on average and by {float(study[1]):.0f} % at worst" in words
    assert f"step time by {study[2]} % on average and by {study[3]} % at worst" in words


def test_the_figures_of_unseen_runs_are_those_of_their_table() -> None:
    """At the top of the accuracy page the mean of all, and of the six newest; on their own page also that of the first 72."""
    page = (DOCS / "unseen.md").read_text()
    errors = [abs(float(text)) for text in re.findall(r"^U\d.* ([+-][\d.]+)% \|$", page, re.MULTILINE)]
    assert len(errors) == 78
    first, newest, both = (round(sum(part) / len(part), 1) for part in (errors[:72], errors[72:], errors))
    accuracy = (DOCS / "accuracy.md").read_text()
    assert f"{both} % off on average (the six newest: {newest} %)" in accuracy
    assert f"{first} % of the first 72, {newest} % of the\nsix newest" in page


def test_memory_of_the_four_layers() -> None:
    """Kept: 4 x 4 GiB in 12 ms. All recomputed: four inputs and one inside, 4 ms more. Two: 2 inputs and 2 layers."""
    peaks = [
        (max(levels), times[-1])
        for times, levels, _ in map(concepts.memory_over_step, ([False] * 4, [True] * 4, [True, True, False, False]))
    ]
    assert peaks == [(16.0, 12.0), (7.0, 16.0), (10.0, 14.0)]


def test_the_requests_of_the_picture_fragment() -> None:
    """A request of 600 MiB between two holes of 400: 600 more in fixed segments, 200 more in expandable ones."""
    for text, most in (("", 1700.0), ("expandable_segments:True", 1300.0)):
        _, active, reserved = concepts.allocator_answers(AllocatorConfig.parse(text))
        assert (max(active), max(reserved)) == (1100.0, most)


def test_the_trade_off_curve_is_convex() -> None:
    """In the order of MSPS every further byte costs at least as much as the one before."""
    order = sorted(concepts.LAYER, key=lambda operator: -operator.msps)
    prices = [operator.runtime_ms / operator.memory_mib for operator in order]
    assert prices == sorted(prices)


def test_rooms_that_import_each_other_are_found() -> None:
    """A circle of three loses its lightest arrow; the rest is one way, on floors above what it imports."""
    down, up = house.one_way({("a", "b"): 3, ("b", "c"): 2, ("c", "a"): 1, ("d", "a"): 1, ("d", "b"): 1})
    assert up == {("c", "a"): 1}
    assert house.floors(down, set("abcde")) == {"a": 2, "b": 1, "c": 0, "d": 3, "e": 0}
    assert sorted(house.direct(down)) == [("a", "b"), ("b", "c"), ("d", "a")]


def test_the_house_is_drawn(tmp_path: Path) -> None:
    """Every room stands in the picture, and the counts are those of the folders."""
    house.draw_all(tmp_path)
    flat = sum(path.name != "__init__.py" for path in (ROOT / "autosac/capture").glob("*.py"))
    counts = (tmp_path / "counts.md").read_text()
    assert f"| modules of `capture/` that are in no folder | 43 | {flat} |" in counts
    assert "| arrows that close a circle | 3 | 0 |" in counts
    assert (tmp_path / "before.svg").stat().st_size > 20_000
    assert (tmp_path / "house.svg").stat().st_size > 10_000
    assert all((tmp_path / f"{hall}.svg").stat().st_size > 5_000 for hall in house.HALLS)
    assert (
        f"| `trace` | {len(list((ROOT / 'autosac/trace').glob('*.py'))) - 1} |" in (tmp_path / "rooms.md").read_text()
    )
