"""What commands say of options that do not go together, pinned in ``messages.txt``: each ends before anything is captured.

``AUTOSAC_UPDATE_GOLDEN=1 pytest tests/cli/test_command_messages.py`` writes the file anew; look at what changed.
"""

from __future__ import annotations

import itertools
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest
from pinned import check

from autosac.cli.parser import main

# What else is right ends with an unknown GPU, or later with a confidence that is no probability.
SOON, LATE = "plan job.toml --gpu unknown", "plan job.toml --gpu h100-sxm-80gb --confidence 2"
PLAN = (
    "--budget 30GiB",
    "--budgets 40GiB,50GiB",
    "--pareto 3",
    "--pareto-html p.html",
    "--maximize tokens-per-second",
    "--batch-sizes 2,4",
    "--confidence 0.9",
    "--moe-load uniform",
    "--moe-draws 2",
    "--moe-seed 1",
    "--levers quick",
)
RUN = ("script.py", "-m module", "none.py", "--plan 60GiB", "-o p.json", "--patience 0", "--memory-html m.html")
CALIBRATE = (
    "job.toml",
    "--sweep",
    "--from-trace t.json",
    "--from-run r.json",
    "--gpu h100-sxm-80gb",
    "--plan p.json",
    "--resume",
    "--threads 2",
    "--device cpu",
)


def plans() -> Iterator[str]:
    """Every option of a plan alone and with every other one, and values at their bounds."""
    yield from (f"{SOON} {' '.join(words)}" for words in (*((w,) for w in PLAN), *itertools.combinations(PLAN, 2)))
    for sizes in ("0", "1,1", "a", "", "1048576", "1048577", "4,,8"):
        yield f"{SOON} --maximize tokens-per-second --batch-sizes '{sizes}'"
    for output in ("--pareto-html=o --pareto-png=o --pareto=2", "-o job.toml", "-o none/p.json"):
        yield f"{SOON} {output}"
    for load in ("even", "zipf:0", "zipf:1.5", "power-law:-1", "power-law:x", "uniform:1"):
        yield f"{SOON} --moe-load {load}"
    for budget in ("0", "-1GiB", "101%", "100%", "0%", "1e30GiB", "5", "68GiB", "73GB", "nan%", "x", "1B", "0.5GiB"):
        yield f"{LATE} --budget={budget}"
    for budgets in ("1GiB,1GiB", "1GiB,1024MiB", "", "1GiB,", ",".join(f"{i}GiB" for i in range(1, 70))):
        yield f"{LATE} --budgets '{budgets}'"
    for option in ("--gap=1", "--gap=-0.1", "--gap=0.999", "--time-limit=0", "--time-limit=1e9", "--pareto=2"):
        yield f"{LATE} {option}"
    for confidence in ("0", "1", "0.99991", "-1", "nan"):
        yield f"plan job.toml --gpu h100-sxm-80gb --confidence={confidence}"


def others() -> Iterator[str]:
    """The same for other commands."""
    for words in itertools.combinations(RUN, 2):
        yield f"run --gpu unknown {' '.join(words)}"
    yield from (
        "run --gpu unknown",
        "run script.py --gpu unknown --patience nan",
        "run script.py --gpu unknown --plan x",
    )
    gpu = "run script.py --gpu h100-sxm-80gb"
    yield from (f"{gpu} --plan {budget}" for budget in ("x", "0", "101%"))
    for words in itertools.combinations(CALIBRATE, 2):
        if any(word.startswith(("--from", "--plan")) for word in words) or words == CALIBRATE[:2]:
            yield f"calibrate {' '.join(words)} -o p.toml"
    for option in (
        "--minutes 0",
        "--minutes 1441",
        "--minutes nan",
        "-- --training.steps 3",
        "--gpu x",
        "--plan p.json",
    ):
        yield f"calibrate --device cpu -o p.toml {option}"
    yield f"calibrate --from-trace {' '.join(f't{i}.json' for i in range(1025))} -o p.toml"
    yield from (
        "calibrate --sweep -o profile",
        "calibrate --from-run script.py -o script.py",
        "calibrate job.toml -o job.toml",
    )
    for option in (
        "--memory-html=job.toml",
        "--trace=job.toml",
        "--memory-png none/p.png",
        "--save-capture=a --trace=a",
    ):
        yield f"simulate job.toml --gpu unknown {option}"
    for option in ("--ac x", "--ac selective-0", "--ac none --plan p.json", "--plan none.json", "--moe-draws 3"):
        yield f"simulate job.toml --gpu h100-sxm-80gb {option}"
    yield from (
        "explain job.toml",
        "explain none.json",
        "diff job.toml none.json",
        "chakra none",
        "gpus x",
        "clusters x",
    )
    yield from ("bench none.toml", "search none.toml --gpu h100-sxm-80gb", "completion fish", "cache --json x")


def test_what_commands_say(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Exit code and message of each command line."""
    monkeypatch.chdir(tmp_path)
    for name in ("NGPU", "WORLD_SIZE", "RANK", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    Path("job.toml").write_text('[model]\nname = "llama3"\nflavor = "debugmodel"\n')
    Path("script.py").write_text("raise SystemExit(3)\n")
    before, lines = sorted(tmp_path.iterdir()), []
    for line in (*plans(), *others()):
        code = main(shlex.split(line))
        printed, said = capsys.readouterr()
        said = re.sub("give one of .*", "give one of ...", said.strip())
        lines.append(f"{line if len(line) < 200 else line[:200] + '...'}\n    {code} {said}")
        assert code and not printed, lines[-1]
    assert sorted(tmp_path.iterdir()) == before
    check(Path(__file__).with_name("messages.txt"), "\n".join(lines))
