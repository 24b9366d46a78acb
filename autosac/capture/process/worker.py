"""The capture process: imports PyTorch and TorchTitan once, then forks one child per capture, as many at once as there are
processors and memory for.

It reads one JSON request per line from its standard input, or ``{"cancel"}`` with the id of one, and writes one JSON answer
per line to a file descriptor:
``{"id", "progress"}`` while it works, perhaps ``{"id", "early"}`` with what the captures of other pipeline stages need, then
``{"id", "done"}`` or ``{"id", "error", "kind"}``; for an answer that is too long for one line, ``{"file"}`` with the name of
the file that holds it. A child saves its trace under the name in the request.

What a plan is made with or verified by goes first (`TitanRequest.is_decisive`): captures that it is only shown beside begin
after these, run at a lower priority, and leave them their processors.

The process ends with its input, and as soon as the process that started it ends (`lifeline`); its children end with it.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import json
import math
import os
import select
import signal
import sys
import tempfile
import warnings
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from autosac.call_stack import with_room
from autosac.capture import lifeline
from autosac.capture.failures import capture_error, how_it_ended
from autosac.capture.patches import imports
from autosac.capture.processors import available_processors
from autosac.capture.request import TitanRequest
from autosac.titan.settings import asks_to_compile, compiles_model

if TYPE_CHECKING:
    from autosac.capture.jobs.adapter import TitanAdapter

_COURTESY = 5  # how much nicer a process is whose capture nothing is decided by: a third of a processor that it shares
AGAIN = 77  # the exit code of a capture that has to be made anew, without copied microbatches
_SPARE_BYTES = 3 * 2**30  # a capture of a large stage takes half a GiB of its own; those that run still grow


class Worker:
    """See the module's docstring."""

    def __init__(self, answers: int, folder: str, programs: tuple[str, str] = ("", "")) -> None:
        self.answers = answers
        self.folder = folder
        self.programs = programs
        self.children: dict[int, int] = {}
        self.asked: dict[int, tuple[dict[str, Any], TitanRequest]] = {}  # what children capture
        self.beside: set[int] = set()  # children whose captures nothing is decided by
        self.pending: list[tuple[dict[str, Any], TitanRequest]] = []
        self.decides = False  # any capture asked for so far
        self.compiles = self.always = False
        self.shares = False  # functions that modules compile are still to be compiled for all captures
        self.shared: TitanRequest | None = None  # the one that they were compiled for
        self.read: set[tuple[object, ...]] = set()  # jobs and their checkpointing (see `read_ahead`)
        self.processors = available_processors()

    def serve(self) -> None:
        """Answer requests until the input ends; then end the captures that are under way."""
        buffer = b""
        open_input = True
        preloaded = False
        while open_input:
            if select.select([0], [], [], 0.02)[0]:
                chunk = os.read(0, 65536)
                open_input = bool(chunk)
                *lines, buffer = (buffer + chunk).split(b"\n")
                for line in lines:
                    message = json.loads(line)
                    if "cancel" in message:
                        self.cancel(message["cancel"])
                        continue
                    request = TitanRequest.from_json(message["request"])
                    if not preloaded:
                        preloaded = self.attempt(message["id"], functools.partial(self.preload, request))
                    self.decides = self.decides or request.is_decisive
                    if preloaded:
                        self.pending.append((message, request))
            self.reap()
            while self.pending and self.has_room(self.pending[place := self.next()][1]):
                self.start(*self.pending.pop(place))
                if self.compiles and self.pending:
                    self.prepare(self.pending[0][1])  # beside the first capture
        for child in self.children:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)

    def next(self) -> int:
        """The place of the capture to start next: one that the compiler need not be prepared for, as long as it is not; what
        is planned with or verified; then what that is shown beside.
        """

        def order(request: TitanRequest) -> tuple[bool, bool]:
            return (self.compiles and not self.always and not request.observe, not request.is_decisive)

        return min(range(len(self.pending)), key=lambda i: (*order(self.pending[i][1]), i))

    def has_room(self, request: TitanRequest) -> bool:
        """Whether this capture may run beside those that do: a decisive one does not mind those that are none."""
        others = self.children.keys() - self.beside if request.is_decisive else self.children.keys()
        return not self.children or (len(others) < self.processors and available_bytes() > _SPARE_BYTES)

    def cancel(self, identity: int) -> None:
        """Nobody waits for this capture any more; what is answered for it nobody reads."""
        self.pending = [(message, request) for message, request in self.pending if message["id"] != identity]
        for child, captured in self.children.items():
            if captured == identity:
                os.kill(child, signal.SIGKILL)

    def share(self, request: TitanRequest) -> None:
        """See `share_functions`. Once, before the first capture: others that run at once would compile the same."""
        self.shares = False
        self.shared = request
        share_functions(request)

    def attempt(self, identity: int, action: Any) -> bool:
        """Run `action`; answer with its error if it fails."""
        try:
            action()
        except (Exception, SystemExit) as e:
            error = capture_error(e, "capturing the job")
            self.answer(id=identity, error=str(error), kind=type(error).__name__)
            return False
        return True

    def preload(self, request: TitanRequest) -> None:
        """See `preload`; remember whether the job compiles, and whether it does so in observed steps, too."""
        self.compiles, self.always = preload(request)
        if self.compiles:
            share_programs(*self.programs)
        self.shares = self.always

    def prepare(self, request: TitanRequest) -> None:
        """See `prepare_compiler`. Once."""
        self.compiles = False
        prepare_compiler(request)

    def read_ahead(self, request: TitanRequest) -> None:
        """Read the job before the first capture does, and its first plan: later captures find what that imports and makes."""
        kind = (request.config_file, request.overrides, request.checkpointing_mode(), request.plan_file is not None)
        if kind not in self.read:
            self.read.add(kind)
            read(request)

    def start(self, message: dict[str, Any], request: TitanRequest) -> None:
        """Fork a child that captures and exits."""
        if self.compiles and (self.always or not request.observe):
            self.prepare(request)
        if self.shares:
            self.share(request)
        self.read_ahead(request)
        identity, parent, code = message["id"], os.getpid(), 1
        try:
            child = os.fork()
        except OSError as e:
            reason = f"no process can be started for a capture: {e.strerror}"
            self.answer(id=identity, error=reason, kind="CaptureLostError")
            return
        if child:
            self.children[child] = identity
            self.asked[child] = (message, request)
            if not request.is_decisive:
                self.beside.add(child)
            return
        try:
            lifeline.end_with(parent)
            if self.decides and not request.is_decisive:
                os.nice(_COURTESY)
            os.dup2(os.open(os.devnull, os.O_RDONLY), 0)  # requests are the parent's alone
            if self.attempt(identity, lambda: self.capture(identity, request, message["trace"])):
                self.answer(id=identity, done=True)
                self.hand_over()
            sys.stdout.flush()
            sys.stderr.flush()
            code = 0
        finally:
            os._exit(code)

    def capture(self, identity: int, request: TitanRequest, path: str) -> None:
        """Capture and save."""
        from autosac.capture.jobs.titan import capture_titan
        from autosac.capture.record.repeats import RepetitionError

        if self.shared is not None and not is_of_one_job(request, self.shared):
            from autosac.capture.jobs import warming

            warming.forget()
        try:
            trace = capture_titan(
                request,
                lambda text: self.answer(id=identity, progress=text),
                lambda info: self.answer(id=identity, early=info.document()),
            )
        except RepetitionError:
            os._exit(AGAIN)
        trace.save(path)

    def found_by(self, child: int) -> Path:
        """The file for what a child has found out that later captures can use."""
        return Path(self.folder) / f"{child}.found"

    def hand_over(self) -> None:
        """See `handover`. In a child, whose capture is answered."""
        from autosac.capture.jobs import handover

        handover.save(self.found_by(os.getpid()))

    def take_over(self, child: int) -> None:
        """See `handover`."""
        from autosac.capture.jobs import handover

        packed = handover.load(self.found_by(child))
        if packed:
            handover.unpack(packed)
            gc.freeze()

    def reap(self) -> None:
        """Answer for children that died without a word; take over what the others have found out."""
        for child, identity in list(self.children.items()):
            finished, status = os.waitpid(child, os.WNOHANG)
            if finished:
                del self.children[child]
                self.beside.discard(child)
                message, request = self.asked.pop(child)
                code = os.waitstatus_to_exitcode(status)
                if code == AGAIN:
                    self.pending.append((message, replace(request, repeats=False)))
                elif code:
                    reason = f"the capture process {how_it_ended(code)}"
                    self.answer(id=identity, error=reason, kind="CaptureLostError")
                else:
                    self.take_over(child)

    def answer(self, **message: Any) -> None:
        """One line. Children share the descriptor: a write of at most PIPE_BUF bytes is never mixed with another's."""
        line = json.dumps(message).encode() + b"\n"
        if len(line) > select.PIPE_BUF:
            handle, name = tempfile.mkstemp(dir=self.folder, suffix=".answer")
            with os.fdopen(handle, "wb") as file:
                file.write(line)
            line = json.dumps({"file": name}).encode() + b"\n"
        os.write(self.answers, line)


def is_of_one_job(request: TitanRequest, other: TitanRequest) -> bool:
    """Whether two captures are of the same model, sizes and machines."""
    return all(
        getattr(request, name) == getattr(other, name) for name in ("config_file", "overrides", "world_size", "gpu")
    )


def available_bytes() -> float:
    """Memory that a new process can have without swapping; infinite where the system does not say (macOS)."""
    with contextlib.suppress(OSError), Path("/proc/meminfo").open() as lines:
        for line in lines:
            if line.startswith("MemAvailable:"):
                return float(line.split()[1]) * 2**10
    return math.inf


def preload(request: TitanRequest) -> tuple[bool, bool]:
    """Import what every capture of this job needs, after the simulated device has been installed.

    Whether it may compile anything, and whether a step compiles something though its model is not compiled.
    """
    from autosac.capture.jobs import session
    from autosac.capture.jobs.warming import start_without_threads

    start_without_threads()
    session.prepare(request.gpu)
    from autosac.capture.jobs import transforms  # noqa: F401
    from autosac.capture.jobs.titan import import_torchtitan, installed_adapter

    with imports.deferred_compilation():
        import_torchtitan(request.gpu)
    adapter = installed_adapter()
    always = compiles_functions(request, adapter)
    compiles = always or may_compile(request, adapter)
    if compiles:
        imports.import_compiler()
    gc.freeze()
    return compiles, always


def read(request: TitanRequest) -> None:
    """See `Worker.read_ahead`."""
    from autosac.capture.jobs.layers import know_layers
    from autosac.capture.jobs.titan import installed_adapter

    with contextlib.suppress(Exception):  # the capture says what is wrong with the job
        adapter = installed_adapter()
        config = adapter.parse(request)
        if request.cut is not None:
            know_layers(adapter, config, request)
    gc.freeze()


def share_programs(folder: str, salt: str) -> None:
    """Captures find there what the compiler has written for others."""
    from autosac.capture.compiler import inductor, programs

    inductor.programs[0] = programs.Programs(Path(folder), salt)


def prepare_compiler(request: TitanRequest) -> None:
    """What captures with compilation share: a compiler that has compiled something."""
    from autosac.capture.compiler import inductor

    inductor.make_ready(request.gpu)
    gc.freeze()


def share_functions(request: TitanRequest) -> None:
    """What captures share whose modules call functions that are compiled by themselves (`warming`)."""
    from autosac.capture.jobs import handover, warming
    from autosac.capture.jobs.titan import installed_adapter

    with contextlib.suppress(Exception):  # then each capture compiles them
        warming.compile_functions(installed_adapter(), request)
        handover.adopt()
    gc.freeze()


def compiles_functions(request: TitanRequest, adapter: TitanAdapter) -> bool:
    """Whether modules of the model call functions that are compiled by themselves."""
    with contextlib.suppress(Exception):  # the capture says what is wrong with the job
        return imports.calls_deferred(adapter.classes(adapter.parse(request)))
    return False


def may_compile(request: TitanRequest, adapter: TitanAdapter) -> bool:
    """Whether the job asks for compilation, as far as that shows without building anything."""
    asked = asks_to_compile(request.config_file, request.overrides)
    if asked is None:
        with contextlib.suppress(Exception):  # the capture says what is wrong with the job
            return compiles_model(adapter.settings(adapter.parse(request)))
    return bool(asked)


@with_room
def main(answers: int, parent: int, folder: str, programs: str, salt: str) -> None:
    """Serve the process `parent`; `folder` takes the answers that are too long for one line, `programs` what the compiler
    writes, under keys that begin with `salt`.
    """
    if (
        sys.platform == "linux"
    ):  # elsewhere the end of its input ends it: a process that forks shall have one thread only
        lifeline.end_with(parent)
    if os.environ.get("AUTOSAC_DEBUG") != "1":
        warnings.filterwarnings("ignore")
    gc.disable()  # importing makes no garbage; TorchTitan collects at its own steps
    imports.install()
    with contextlib.suppress(ImportError):  # the first capture says so
        import torch  # before the first request comes

        torch.set_num_threads(1)  # captures run beside each other, and their values are small
    Worker(answers, folder, (programs, salt)).serve()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # nothing is left to do, and to take PyTorch down module by module takes seconds
