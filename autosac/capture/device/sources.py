"""Which line of the user's program (or of the model library) issued an operator."""

from __future__ import annotations

import importlib.util
import sys
from functools import cache
from pathlib import Path
from types import FrameType, TracebackType

_SPEC = importlib.util.find_spec("torch")
_TORCH = f"{Path(_SPEC.origin).parent}/" if _SPEC is not None and _SPEC.origin else "(torch is missing)"
_OWN = f"{Path(__file__).resolve().parents[2]}/"


@cache
def _is_internal(filename: str) -> bool:
    """PyTorch's and this project's own frames, except optimizers and FSDP, which are informative."""
    if filename.startswith("<"):
        return True
    if filename.startswith((_OWN, f"{Path(_OWN).parent}/integrations/")):
        return True
    if filename.startswith(_TORCH):
        return not filename.startswith((f"{_TORCH}optim", f"{_TORCH}distributed/fsdp"))
    return filename.endswith(("contextlib.py", "threading.py"))


@cache
def _line(filename: str, number: int) -> str:
    parts = Path(filename).parts
    return f"{'/'.join(parts[-2:])}:{number}"


def calling_line() -> str:
    """``folder/file.py:line`` of the nearest frame outside of PyTorch and of this project; "" if there is none."""
    frame = calling_frame()
    return "" if frame is None else _line(frame.f_code.co_filename, frame.f_lineno)


def calling_frame() -> FrameType | None:
    """The nearest frame outside of PyTorch and of this project."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and _is_internal(frame.f_code.co_filename):
        frame = frame.f_back
    return frame


def line_of(frame: FrameType | None) -> str:
    """``folder/file.py:line`` of a frame, or of the nearest one around it outside of PyTorch and of this project."""
    while frame is not None:
        if not _is_internal(frame.f_code.co_filename):
            return _line(frame.f_code.co_filename, frame.f_lineno)
        frame = frame.f_back
    return "an unknown place"


def innermost_line(traceback: TracebackType | None) -> str:
    """``folder/file.py:line`` of the innermost frame of a traceback outside of PyTorch and of this project."""
    found = "an unknown place"
    while traceback is not None:
        filename = traceback.tb_frame.f_code.co_filename
        if not _is_internal(filename):
            found = _line(filename, traceback.tb_lineno)
        traceback = traceback.tb_next
    return found


def raised_in(traceback: TracebackType | None) -> str:
    """`` in function (folder/file.py:line)`` of the frame that raised an error, whosever it is; "" without a traceback."""
    if traceback is None:
        return ""
    while traceback.tb_next is not None:
        traceback = traceback.tb_next
    code = traceback.tb_frame.f_code
    return f" in {code.co_name} ({_line(code.co_filename, traceback.tb_lineno)})"
