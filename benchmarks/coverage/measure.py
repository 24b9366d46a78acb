"""One row, in a process of its own: ``python -m benchmarks.coverage.measure KEY`` prints a `Result` as one line of JSON.

The job is simulated as `autosac simulate` does it; an error is the one that the command would print.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import resource
import signal
import subprocess
import sys
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from autosac.errors import AutosacError
from autosac.memory_sim import Outcome
from autosac.trace import Trace
from benchmarks.coverage.rows import Row, load_rows

JOB_FILE = Path(__file__).with_name("job.toml")
_PACKAGES = ("autosac", "torch", "torchtitan", "torchao", "transformers", "torchvision", "triton")
_GRACE_S = 10  # for a process that has been told to end


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """What became of a row. `outcome`: an `Outcome` of the worst rank, "error" or "left out"; with the last two, `reason` says
    why.

    `ranks`: how many were captured. `cpu_s`: user time of all processes of the command, from its start to its result; 0 if
    unknown. `operators`: that launch something, of all captured ranks. `step_ms`, `peak_bytes` (what would be reserved if the
    device never ran out): of the whole job, of its fullest rank. `ran`: the day, and the packages that decide what works.
    """

    outcome: str
    reason: str = ""
    ranks: int = 0
    cpu_s: float = 0.0
    operators: int = 0
    peak_bytes: int = 0
    step_ms: float = 0.0
    ran: str = ""


def measure(row: Row) -> Result:
    """Simulate the job in this process (its captures run in others)."""
    from autosac.jobs.tasks import TitanJob, simulate_job

    try:
        job = TitanJob.of(str(JOB_FILE), gpu=row.gpu, world_size=row.gpus, overrides=row.arguments)
        simulation, _ = simulate_job(job)
    except AutosacError as e:
        return Result(outcome="error", reason=str(e), ran=_circumstances())
    stages = simulation.pipeline.stages if simulation.pipeline is not None else (simulation,)
    return Result(
        outcome=max((stage.allocation.verdict.outcome for stage in stages), key=list(Outcome).index).value,
        ranks=len(stages),
        step_ms=simulation.step_ms,
        peak_bytes=max(stage.peak_reserved_bytes for stage in stages),
        operators=sum(_launched(stage.trace) for stage in stages),
        cpu_s=sum(resource.getrusage(who).ru_utime for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)),
        ran=_circumstances(),
    )


def _circumstances() -> str:
    """Today, and what is installed."""
    found = [str(datetime.date.today())]
    for package in _PACKAGES:
        with contextlib.suppress(PackageNotFoundError):
            found.append(f"{package} {version(package)}")
    return ", ".join(found)


def _launched(trace: Trace) -> int:
    return sum(not trace.signatures[op.signature].is_view for _, op in trace.operators())


def run(row: Row, limit_s: float) -> Result:
    """`measure` in a process of its own, which ends with all its children after `limit_s` seconds."""
    if row.missing():
        return Result(outcome="left out", reason=f"needs {', '.join(row.missing())}")
    process = subprocess.Popen(
        [sys.executable, "-m", "benchmarks.coverage.measure", row.key],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "AUTOSAC_CACHE": "off"},  # what is timed is a capture
    )
    try:
        out, err = process.communicate(timeout=limit_s)
    except subprocess.TimeoutExpired:
        return Result(outcome="error", reason=f"not done after {limit_s:.0f} s")
    finally:
        _end(process)
    if process.returncode:
        last = (err.strip().splitlines() or ["no word"])[-1]
        return Result(outcome="error", reason=f"the program failed: {last}")
    return Result(**json.loads(out.splitlines()[-1]))


def _end(process: subprocess.Popen[str]) -> None:
    """As Ctrl-C does, so that it cleans up; then by force."""
    if process.poll() is None:
        process.send_signal(signal.SIGINT)
        try:
            process.wait(_GRACE_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


if __name__ == "__main__":
    (wanted,) = (row for row in load_rows() if row.key == sys.argv[1])
    print(json.dumps(asdict(measure(wanted))))
    sys.stdout.flush()
    os._exit(0)  # a trace of a large job takes seconds to tear down
