"""Processes of scripts that are forked from one which has imported PyTorch: that takes most of a small script's time.

Test modules import this as ``warm_scripts`` (see `pythonpath` in pyproject.toml). `Pool.popen` stands for `subprocess.Popen`
where `autosac run` starts the process of a rank. What a fork forks has no environment of its own as the system shows it: tests
of interrupts and of what is left behind start real processes (`run_alone`).
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import select
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

_MOST = 5  # processes at a time that have imported PyTorch: each holds a third of a GB
_SERVE = "import importlib.util as u, sys; s = u.spec_from_file_location('warm_scripts', sys.argv[1]); "
_SERVE += "m = u.module_from_spec(s); s.loader.exec_module(m); m.serve(int(sys.argv[2]), 'compiles' in sys.argv)"
_LONGEST = 2**20
_PROCESS, _TEMPLATE = "autosac.scripts.process", "autosac.scripts.template"


class Pool:
    """Processes to fork from, by the GPU and how many of them they have, and whether the compiler is ready."""

    def __init__(self) -> None:
        self._servers: dict[tuple[str, int, bool], _Server] = {}

    def popen(
        self,
        command: list[str],
        *,
        env: dict[str, str],
        stdin: int | None = None,
        stderr: Any = None,
        pass_fds: tuple[int, ...] = (),
    ) -> WarmProcess:
        """As `subprocess.Popen`, of ``python -m autosac.scripts.process REQUEST.json FOLDER PARENT``, or of a template:
        ``autosac.scripts.template REQUEST.json DESCRIPTOR PARENT [compiles]``.
        """
        assert command[1] == "-m" and command[2] in (_PROCESS, _TEMPLATE)
        request = json.loads(Path(command[3]).read_text())
        key = (request["gpu"], request["nproc"] or 1, _compiles(request["script"]))
        server = self._servers.pop(key, None)
        while server is None and len(self._servers) >= _MOST:
            self._servers.pop(next(iter(self._servers))).end()
        server = server if server is not None and server.process.poll() is None else _Server(command[3], key[2])
        self._servers[key] = server  # the last that was used
        sys.stdout.flush()
        with Path(os.devnull).open() as nothing:
            files = (nothing.fileno(), 1, 2 if stderr is None else stderr.fileno(), *pass_fds)
            return server.fork([] if command[2] == _TEMPLATE else command[3:5], env, files)

    def close(self) -> None:
        """End them all."""
        while self._servers:
            self._servers.popitem()[1].end()


class WarmProcess:
    """What `launch.RankProcess` asks of a `subprocess.Popen`."""

    def __init__(self, pid: int, ended: int) -> None:
        self.pid, self._ended = pid, ended
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """The exit code; None while it runs."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.wait(0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Until it has ended."""
        if self.returncode is None:
            if not select.select([self._ended], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired("autosac.scripts.process", timeout or 0)
            self.returncode = int(os.read(self._ended, 16) or -signal.SIGKILL)
            os.close(self._ended)
        return self.returncode

    def kill(self) -> None:
        """Unless it has ended."""
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)


class _Server:
    """A process to fork from."""

    def __init__(self, request_file: str, compiles: bool) -> None:
        self._socket, theirs = socket.socketpair()
        with theirs:
            command = [sys.executable, "-c", _SERVE, __file__, str(theirs.fileno()), *["compiles"] * compiles]
            self.process = subprocess.Popen(command, stdin=subprocess.DEVNULL, pass_fds=(theirs.fileno(),))
        self._socket.send(request_file.encode())
        answer = self._socket.recv(_LONGEST)
        assert answer == b"ready", answer

    def fork(self, arguments: list[str], env: dict[str, str], files: tuple[int, ...]) -> WarmProcess:
        """A process with these arguments (of a template: none), environment, and standard input, output and error; requests
        of a template come from the fourth file.
        """
        ended, theirs = os.pipe()
        message = json.dumps({"arguments": arguments, "env": env, "folder": str(Path.cwd())}).encode()
        socket.send_fds(self._socket, [len(message).to_bytes(8, "big")], [theirs, *files])
        self._socket.sendall(message)
        os.close(theirs)
        return WarmProcess(int(self._socket.recv(16)), ended)

    def end(self) -> None:
        """With all that it has forked."""
        self._socket.close()
        self.process.wait()


def _compiles(script: str) -> bool:
    """Whether the script asks `torch.compile`. One that compiles in another way imports the compiler itself."""
    file = Path(script)
    return file.is_file() and "torch.compile(" in file.read_text()


def serve(descriptor: int, compiles: bool) -> None:
    """In the process to fork from: import PyTorch, then fork for each request until there is nobody to ask."""
    from autosac.capture import lifeline
    from autosac.scripts import process, template
    from autosac.scripts.request import ScriptRequest
    from autosac.scripts.target import script_target

    lifeline.end_with(os.getppid())
    requests = socket.socket(fileno=descriptor)
    first = ScriptRequest.load(Path(requests.recv(_LONGEST).decode()))
    clock = process.prepare(script_target(first).gpu, first.nproc or 1)
    template.make_ready(script_target(first).gpu, compiles=compiles)
    gc.freeze()  # a collection would touch, and so copy, all pages in each fork
    requests.send(b"ready")
    children: dict[int, int] = {}
    while True:
        if select.select([requests], [], [], 0.01 if children else None)[0]:
            header, files, _, _ = socket.recv_fds(requests, 8, 5)
            if not header:
                break
            ended, *files = files
            message = json.loads(requests.recv(int.from_bytes(header, "big"), socket.MSG_WAITALL))
            child = os.fork()
            if not child:
                requests.close()
                for descriptor in (ended, *children.values()):
                    os.close(descriptor)
                _become(message, files[:3])
                if message["arguments"]:
                    process.main(*message["arguments"], str(os.getppid()), clock)
                lifeline.end_with(os.getppid())
                template.answer(files[3], clock)
                os._exit(0)
            children[child] = ended
            for file in files:
                os.close(file)
            requests.send(str(child).encode())
        for child, told in list(children.items()):
            finished, status = os.waitpid(child, os.WNOHANG)
            if finished:
                os.write(told, str(os.waitstatus_to_exitcode(status)).encode())
                os.close(told)
                del children[child]
    for child in children:
        os.kill(child, signal.SIGKILL)


def _become(message: dict[str, Any], files: list[int]) -> None:
    """What a process that is started would have from its parent."""
    for number, file in enumerate(files):
        os.dup2(file, number)
        os.close(file)
    os.chdir(message["folder"])
    os.environ.clear()
    os.environ.update(message["env"])
