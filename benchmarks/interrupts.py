"""Commands that are interrupted at random moments: ``python -m benchmarks.interrupts --trials 200 --seed 0``.

Each trial starts ``autosac plan`` or ``autosac simulate`` on TorchTitan's debug model, with its outputs, its cache and its
temporary files in folders of this program's, and sends SIGINT, SIGTERM or SIGKILL at a moment chosen evenly over the time that
the command takes. Half of the trials find outputs of an earlier run. Checked after each:

- every output is absent, the earlier one, or whole;
- after SIGINT and SIGTERM the exit code is 130 or 143 with one line, and no temporary file is left;
- no process is left.

After every tenth trial and in the end the same commands run without an interruption. Then the folders hold what these runs
have written and nothing else. The exit code is 1 if anything was otherwise.

A signal that comes before Python has started the command ends the process in Python's own way, one that comes while Python
ends finds the work done; the table counts these by themselves.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from autosac.errors import AutosacError
from autosac.plans import Plan
from autosac.trace import Trace

JOB = '[model]\nname = "llama3"\nflavor = "debugmodel"\n\n[activation_checkpoint]\nmode = "none"\n'
MACHINE = ("--gpu", "h100-sxm-80gb", "--world-size", "2")
# Each command with the options that name its outputs.
COMMANDS = {
    "plan": (("--budget", "1100MiB"), {"-o": "plan.json"}),
    "simulate": ((), {"--trace": "trace.json", "--memory-html": "memory.html", "--save-capture": "step.trace"}),
}
SIGNALS = (signal.SIGINT, signal.SIGINT, signal.SIGTERM, signal.SIGTERM, signal.SIGKILL)
OLD = "of an earlier run\n"
TAG = "AUTOSAC_INTERRUPTS_TAG"
PATIENCE_S = 120.0  # a command that goes on for longer after a signal hangs
LEAVING_S = 15.0  # what the last processes may take to end
EVERY = 10
_CACHED = 0.75  # of the trials take captures from the cache: they are quick


@dataclass(frozen=True, kw_only=True)
class Run:
    """How a command ended."""

    code: int
    out: str
    err: str
    seconds: float


class Place:
    """The folders of all trials, and the commands that run in them."""

    def __init__(self, folder: Path) -> None:
        self.job = folder / "job.toml"
        self.job.write_text(JOB)
        self.outputs, self.temporary, self.cache = folder / "outputs", folder / "tmp", folder / "cache"
        for path in (self.outputs, self.temporary, self.cache):
            path.mkdir()
        self.tag = uuid.uuid4().hex

    def start(self, command: str, *, cached: bool) -> subprocess.Popen[str]:
        """Start a command."""
        options, outputs = COMMANDS[command]
        named = [word for option, name in outputs.items() for word in (option, str(self.outputs / name))]
        fresh = [] if cached else ["--no-cache"]
        return subprocess.Popen(
            [sys.executable, "-m", "autosac", command, str(self.job), *MACHINE, *options, *named, *fresh],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            preexec_fn=_hear_sigint,
            env={
                **os.environ,
                TAG: self.tag,
                "TMPDIR": str(self.temporary),
                "XDG_CACHE_HOME": str(self.cache),
                "AUTOSAC_CACHE": "on",
            },
        )

    def run(self, command: str, *, cached: bool, number: int = 0, after_s: float = 0.0) -> Run | None:
        """Run a command, and send it a signal (0: none) after some time. None if it never ends."""
        begin = time.monotonic()
        process = self.start(command, cached=cached)
        try:
            if number:
                try:
                    process.wait(after_s)
                except subprocess.TimeoutExpired:
                    process.send_signal(number)
            out, err = process.communicate(timeout=PATIENCE_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()
            return None
        return Run(code=process.returncode, out=out, err=err, seconds=time.monotonic() - begin)

    def processes(self) -> list[str]:
        """The command lines of all processes that the commands have started and that are still there, after a moment."""
        limit = time.monotonic() + LEAVING_S
        while (found := self._processes()) and time.monotonic() < limit:
            time.sleep(0.05)
        return found

    def _processes(self) -> list[str]:
        found = []
        for entry in Path("/proc").iterdir():
            try:
                if entry.name.isdigit() and f"{TAG}={self.tag}".encode() in (entry / "environ").read_bytes():
                    found.append((entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace"))
            except OSError:  # it has ended
                continue
        return found

    def prepare(self, *, old: bool) -> None:
        """Outputs of an earlier run, or none. What a killed writer has left stays for the next run."""
        for _, outputs in COMMANDS.values():
            for name in outputs.values():
                path = self.outputs / name
                path.unlink(missing_ok=True)
                if old:
                    path.write_text(OLD)

    def broken(self, command: str, *, old: bool, whole: bool) -> list[str]:
        """The outputs that are half-written; with `whole` also those that are absent."""
        wrong = []
        for name in COMMANDS[command][1].values():
            path = self.outputs / name
            if not path.exists():
                state = "absent" if old or whole else ""
            elif path.read_bytes() == OLD.encode():
                state = "still the earlier one" if whole else ""
            else:
                state = _what_is_wrong(path)
            if state:
                wrong.append(f"{name} is {state}")
        return wrong

    def strangers(self) -> list[str]:
        """What lies in the folders beside outputs and captures."""
        names = {name for _, outputs in COMMANDS.values() for name in outputs.values()}
        found = [path for path in self.outputs.iterdir() if path.name not in names]
        found += self.temporary.iterdir()
        captures = self.cache / "autosac" / "captures"
        if captures.is_dir():
            found += [path for path in captures.iterdir() if path.suffix != ".trace" or _what_is_wrong(path)]
        return [f"{path.parent.name}/{path.name} is left" for path in found]


def _hear_sigint() -> None:
    """A shell starts what runs in its background with SIGINT ignored, and programs inherit that."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


def _what_is_wrong(path: Path) -> str:
    """Why a file is not whole; "" if it is."""
    try:
        if path.name == "plan.json":
            Plan.load(path)
        elif path.suffix == ".trace":
            Trace.load(path)
        elif path.suffix == ".json":
            json.loads(path.read_text())
        elif not path.read_text().rstrip().endswith("</html>"):
            return "cut off"
    except (AutosacError, ValueError) as e:
        return f"damaged: {e}"
    return ""


def outcome(run: Run, number: int) -> str:
    """How a command that got a signal has ended; what is not as it should be begins with "wrong"."""
    if run.code == 0:
        return "had ended"
    if number == signal.SIGKILL:
        return "interrupted" if run.code == -number else f"wrong: exit code {run.code}"
    if run.code == 128 + number and run.err.splitlines()[-1:] == ["autosac: interrupted"]:
        lines = [line for line in run.err.splitlines() if not line.startswith("autosac: ")]
        return "interrupted" if not lines else f"wrong: it says {lines[0]!r}"
    if run.code == -number and "autosac" not in run.out and "autosac/cli" not in run.err:
        return "not begun, or ending"
    return f"wrong: exit code {run.code}, it says {run.err.strip()[-200:]!r}"


def ordinary(place: Place) -> tuple[list[str], dict[str, float]]:
    """Both commands without an interruption: what is wrong afterwards, and how long they took."""
    wrong, seconds = [], {}
    place.prepare(old=False)
    for command in COMMANDS:
        run = place.run(command, cached=True)
        if run is None or run.code != 0:
            wrong.append(f"an ordinary {command} failed: {run.err.strip()[-200:] if run else 'it hangs'}")
        else:
            seconds[command] = run.seconds
        wrong += place.broken(command, old=False, whole=True)
    return wrong + place.strangers() + place.processes(), seconds


def trial(
    place: Place, chosen: random.Random, seconds: dict[tuple[str, bool], float], signals: tuple[signal.Signals, ...]
) -> tuple[str, str, list[str]]:
    """One interrupted command: its signal's name, how it ended, what is wrong afterwards."""
    command, cached = chosen.choice(list(COMMANDS)), chosen.random() < _CACHED
    old, number = chosen.random() < 0.5, chosen.choice(signals)
    place.prepare(old=old)
    before = set(place.temporary.iterdir())
    run = place.run(command, cached=cached, number=number, after_s=chosen.uniform(0, seconds[command, cached]))
    if run is None:
        return number.name, "hung", [f"{command} hangs after {number.name}"]
    end = outcome(run, number)
    wrong = place.broken(command, old=old, whole=end == "had ended") + place.processes()
    if number != signal.SIGKILL and end == "interrupted":
        wrong += [f"{path.name} is left" for path in set(place.temporary.iterdir()) - before]
    if end.startswith("wrong"):
        wrong.append(end)
        end = "wrong"
    return number.name, end, [f"{command}, {number.name}: {what}" for what in wrong]


def main() -> int:
    """See the module's docstring."""
    parser = argparse.ArgumentParser(description="interrupt commands at random moments")
    parser.add_argument("--trials", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--signal", action="append", choices=sorted({s.name for s in SIGNALS}), help="only this signal")
    arguments = parser.parse_args()
    signals = tuple(signal.Signals[name] for name in arguments.signal or ()) or SIGNALS
    chosen = random.Random(arguments.seed)
    counts: Counter[tuple[str, str]] = Counter()
    problems: list[str] = []
    with tempfile.TemporaryDirectory(prefix="interrupts-") as folder:
        place = Place(Path(folder))
        problems += ordinary(place)[0]
        seconds = {(command, True): s for command, s in ordinary(place)[1].items()}
        for command in COMMANDS:
            run = place.run(command, cached=False)
            seconds[command, False] = run.seconds if run else PATIENCE_S
        for number in range(1, arguments.trials + 1):
            name, end, wrong = trial(place, chosen, seconds, signals)
            counts[name, end] += 1
            if number % EVERY == 0 or number == arguments.trials:
                wrong += ordinary(place)[0]
                print(f"{number} trials, {len(problems) + len(wrong)} problems", file=sys.stderr, flush=True)
            for what in wrong:
                print(f"trial {number}: {what}", flush=True)
            problems += wrong
    ends = ("interrupted", "not begun, or ending", "had ended", "wrong", "hung")
    print("| signal | " + " | ".join(ends) + " |\n|---|" + "--:|" * len(ends))
    for name in sorted({name for name, _ in counts}):
        print(f"| {name} | " + " | ".join(str(counts[name, end]) for end in ends) + " |")
    print(f"{arguments.trials} trials, {len(problems)} problems")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
