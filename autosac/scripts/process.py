"""The process of a script: ``python -m autosac.scripts.process REQUEST.json FOLDER PARENT``.

It makes ``cuda`` the simulated GPU, imports torch, and runs the script as Python would: the same ``sys.argv``, ``sys.path``
and ``__main__``, its own output and input. The captured step and the outcome are left in the folder.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import runpy
import signal
import sys
import threading
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, NoReturn

from autosac.call_stack import with_room
from autosac.capture import lifeline
from autosac.capture.process.store import kept_programs
from autosac.errors import AutosacError, MicrobatchError
from autosac.interrupts import take_interrupts
from autosac.scripts.clock import SimulatedClock
from autosac.scripts.request import OUTCOME, TRACE, ScriptOutcome, ScriptRequest
from autosac.scripts.target import script_target

if TYPE_CHECKING:
    from autosac.scripts.run import ScriptRun
    from autosac.target import TargetGPU


_OWN = str(Path(__file__).parents[1]) + os.sep
_NO_INPUT = "EOF when reading a line"  # what `input` raises at the end
_end_process = os._exit
_WHY_NO_STEP = (
    "a step ends with the step() of a torch.optim optimizer; it may prepare data, wait for input or for another process, or "
    "train in another process. --patience sets how long to wait"
)


@with_room
def main(request_file: str, folder: str, parent: str, clock: SimulatedClock | None = None) -> None:
    """Run the script. Ends the process, with the script's exit code. `clock`: that of `prepare`, if it has been called."""
    lifeline.end_with(int(parent))
    request = ScriptRequest.load(Path(request_file))
    if request.quiet:
        _drop_output(1)
    if request.is_changed:
        _drop_output(2)
    _leave(_run(request, Path(folder), clock), Path(folder))


def _leave(outcome: ScriptOutcome, folder: Path) -> NoReturn:
    """End the process. Not even threads of the script keep it."""
    outcome.save(folder / OUTCOME)
    _end_workers()
    with contextlib.suppress(OSError, ValueError):
        sys.stdout.flush()
        sys.stderr.flush()
    _end_process(outcome.exit_code)


def _end_workers() -> None:
    """Of data loaders: they would complain, each with a traceback, that the process is gone."""
    multiprocessing = sys.modules.get("multiprocessing")
    if multiprocessing is not None and hasattr(signal, "SIGCHLD"):
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # the loader's own handler would raise
        for worker in multiprocessing.active_children():
            worker.kill()


def _drop_output(descriptor: int) -> None:
    os.dup2(os.open(os.devnull, os.O_WRONLY), descriptor)


def prepare(gpu: TargetGPU, device_count: int) -> SimulatedClock:
    """Import torch with so many GPUs of this kind as its CUDA devices. Once a process, before all else of the script's.

    Returns the clock that the process has from now on. CaptureError where the library for that cannot be built or loaded.
    """
    from autosac.capture.cuda import functions, shim

    shim.load_shim(device_count)
    functions.announce(gpu, device_count)
    clock = SimulatedClock()
    from autosac.scripts import run  # noqa: F401 # it imports torch

    functions.finish(gpu)
    return clock


def _run(request: ScriptRequest, folder: Path, clock: SimulatedClock | None) -> ScriptOutcome:
    """Everything up to the outcome."""
    try:
        take_interrupts()
        target = script_target(request)
        clock = clock or prepare(target.gpu, request.nproc or 1)
        from autosac.capture.compiler import inductor
        from autosac.scripts.run import ScriptRun

        inductor.programs[0] = kept_programs("scripts")
        run = ScriptRun(request, target, clock, folder / TRACE)
    except AutosacError as e:
        return ScriptOutcome(exit_code=e.exit_code, error=str(e))
    except KeyboardInterrupt:  # before the script's first line: nothing of it is to be seen
        return ScriptOutcome(exit_code=130)
    _set_up(request)
    prints = _Prints()
    gc.freeze()  # what has been imported is no garbage: collections need not go through it
    run.leave = lambda: _leave(replace(run.finish(0), printed=prints.any), folder)
    _exit_with(lambda code: _leave(replace(run.finish(code), printed=prints.any), folder))
    watchdog = _Watchdog(request, run, folder)
    try:
        with run.active():
            code = _execute(request, run)
    except AutosacError as e:
        uneven = isinstance(e, MicrobatchError)
        return ScriptOutcome(exit_code=e.exit_code, steps=run.steps, error=str(e), is_uneven=uneven)
    finally:
        watchdog.stop()
    return replace(run.finish(code), printed=prints.any)


def _exit_with(leave: Callable[[int], NoReturn]) -> None:
    """`os._exit` of this process, which is how some scripts end, leaves what has been found so far."""
    process = os.getpid()

    def exit_now(status: int) -> NoReturn:
        if os.getpid() == process:
            leave(status)
        _end_process(status)

    vars(os)["_exit"] = exit_now


class _Prints:
    """Whether the script prints anything on standard output, from Python, or logs what is no warning, on whatever stream."""

    def __init__(self) -> None:
        self.any = False
        self._write = sys.stdout.write
        sys.stdout.write = self._written  # type: ignore[method-assign]
        emit = logging.StreamHandler.emit

        def log(handler: logging.StreamHandler[Any], record: logging.LogRecord) -> None:
            self.any |= record.levelno < logging.WARNING
            emit(handler, record)

        vars(logging)["StreamHandler"].emit = log

    def _written(self, text: str) -> int:
        self.any = True
        return self._write(text)


def _set_up(request: ScriptRequest) -> None:
    """Arguments, search path and environment as Python and torchrun give them."""
    sys.argv = [request.script, *request.arguments]
    sys.path[0] = "" if request.is_module else str(Path(request.script).resolve().parent)
    os.environ.pop("CUDA_VISIBLE_DEVICES", None)
    os.environ["WANDB_MODE"] = "disabled"  # its losses are invented
    # Python 3.12 warns of a fork beside threads, and the watchdog is one that the script has not started.
    warnings.filterwarnings("ignore", r".* is multi-threaded, use of fork\(\)", DeprecationWarning)
    if request.nproc is None:
        return
    rank, nproc = request.rank, request.nproc
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank % nproc),
        GROUP_RANK=str(rank // nproc),
        ROLE_RANK=str(rank),
        ROLE_NAME="default",
        WORLD_SIZE=str(request.world_size),
        LOCAL_WORLD_SIZE=str(nproc),
        GROUP_WORLD_SIZE=str(request.nodes),
        ROLE_WORLD_SIZE=str(request.world_size),
        MASTER_ADDR="localhost",
        MASTER_PORT="29500",
        TORCHELASTIC_RUN_ID="autosac",
        TORCHELASTIC_RESTART_COUNT="0",
        TORCHELASTIC_MAX_RESTARTS="0",
    )
    os.environ.setdefault("OMP_NUM_THREADS", "1")


def _execute(request: ScriptRequest, run: ScriptRun) -> int:
    """Run it; its exit code. What it raises is shown as Python would, without this project's frames, unless it was stopped."""
    from autosac.capture.failures import capture_error
    from autosac.capture.jobs.script import StopScript
    from autosac.integrations import stand_ins

    if request.stand_ins:
        stand_ins.load(request.stand_ins)
    try:
        if request.is_module:
            runpy.run_module(request.script, run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(request.script, run_name="__main__")
    except StopScript:
        return 0
    except SystemExit as e:
        if isinstance(e.code, str):
            print(e.code, file=sys.stderr)
            return 1
        return int(e.code or 0)
    except KeyboardInterrupt:
        return 130
    except AutosacError:
        raise
    except BaseException as e:
        if run.stopped:
            return 0
        if request.is_changed:
            raise capture_error(e, "running the script once more, for a plan") from e
        sys.excepthook(type(e), e.with_traceback(_of_script(e.__traceback__)), e.__traceback__)
        _say_what_is_missing(e)
        return 1
    return 0


def _say_what_is_missing(error: BaseException) -> None:
    """A package of kernels that has no build for this machine, an operator that PyTorch has no shape function for, input."""
    from autosac.integrations.stand_ins import NAMED, WITHOUT

    if isinstance(error, EOFError) and str(error) == _NO_INPUT:
        print(
            "autosac: standard input is empty under `autosac run`: give the script what it asks for as arguments after --",
            file=sys.stderr,
        )
    operator = _without_shapes(error)
    if operator:
        print(
            f"autosac: the simulated GPU cannot run {operator}: PyTorch does not know the shapes of its results",
            file=sys.stderr,
        )
    package = (error.name or "").split(".")[0] if isinstance(error, ModuleNotFoundError) else ""
    if package in NAMED:
        print(
            f"autosac: {package} is not installed: --stand-in {package} uses PyTorch's own kernels instead",
            file=sys.stderr,
        )
    elif package in WITHOUT:
        print(f"autosac: {package} is not installed, and has no stand-in: {WITHOUT[package]}", file=sys.stderr)


def _without_shapes(error: BaseException | None) -> str:
    """The operator that an error is about, if it is that the shapes of its results are not known."""
    from torch._subclasses.fake_tensor import DynamicOutputShapeException, UnsupportedOperatorException

    while error is not None:
        if isinstance(error, (DynamicOutputShapeException, UnsupportedOperatorException)):
            return str(error.func)
        name, found, _ = str(error).partition(": attempted to run this operator with Meta tensors")
        if found:
            return name
        error = error.__cause__ or error.__context__
    return ""


def _of_script(found: TracebackType | None) -> TracebackType | None:
    """The traceback from the script's first line on, without the frames of this project (but for AUTOSAC_DEBUG=1)."""
    while found is not None and found.tb_next is not None and _starts_scripts(found):
        found = found.tb_next
    return found if os.environ.get("AUTOSAC_DEBUG") == "1" else _without_own(found)


def _starts_scripts(found: TracebackType) -> bool:
    name = found.tb_frame.f_code.co_filename
    return name == __file__ or name.startswith("<frozen runpy") or Path(name).name == "runpy.py"


def _without_own(found: TracebackType | None) -> TracebackType | None:
    kept = []
    while found is not None:
        if not found.tb_frame.f_code.co_filename.startswith(_OWN):
            kept.append(found)
        found = found.tb_next
    shown = None
    for frame in reversed(kept):
        shown = TracebackType(shown, frame.tb_frame, frame.tb_lasti, frame.tb_lineno)
    return shown


class _Watchdog:
    """Ends a script that takes no step for a long time."""

    def __init__(self, request: ScriptRequest, run: ScriptRun, folder: Path) -> None:
        self._patience_s = request.patience_s
        self._run = run
        self._folder = folder
        self._stopped = threading.Event()
        threading.Thread(target=self._watch, daemon=True, name="autosac-watchdog").start()

    def stop(self) -> None:
        """The script has ended."""
        self._stopped.set()

    def _watch(self) -> None:
        steps = -1
        while not self._stopped.is_set():
            if steps == (steps := self._run.steps):
                complaint = f"the script has taken no {'further ' if steps else ''}step for {self._patience_s:g} s "
                complaint += f"(at {_place_of_main_thread()}): "
                outcome = self._run.so_far(f"{complaint}it was ended after step {steps}")
                if outcome is None:
                    outcome = ScriptOutcome(exit_code=1, steps=max(0, steps), error=complaint + _WHY_NO_STEP)
                _leave(outcome, self._folder)
            self._stopped.wait(self._patience_s)


def _place_of_main_thread() -> str:
    from autosac.capture.device.sources import line_of

    return line_of(sys._current_frames().get(threading.main_thread().ident or 0))


if __name__ == "__main__":
    _, request_file, folder, parent = sys.argv
    main(request_file, folder, parent)
