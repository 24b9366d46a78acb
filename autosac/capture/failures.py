"""Why a job could not be captured, in one line."""

from __future__ import annotations

import os
import traceback

from autosac.capture.sources import innermost_line
from autosac.errors import AutosacError, CaptureError

_LIMIT = 400  # characters of a message


def one_line(error: BaseException) -> str:
    """An error's message without line breaks; its type if it has none."""
    return " ".join(str(error).split()) or type(error).__name__


def explain(error: BaseException, doing: str) -> AutosacError:
    """A CaptureError that names the call in the user's or model's code where capture failed, and what to do.

    An AutosacError is its own explanation. With AUTOSAC_DEBUG=1 in the environment the traceback is printed, too.
    """
    if os.environ.get("AUTOSAC_DEBUG") == "1":
        traceback.print_exception(error)
    if isinstance(error, AutosacError):
        return error
    where = innermost_line(error.__traceback__)
    root: BaseException = error
    while root.__cause__ is not None:
        root = root.__cause__
    told = _told(error, _LIMIT) if root is error else f"{_told(error, _LIMIT // 2)}, because of {_told(root, _LIMIT // 2)}"
    return CaptureError(f"{doing}: {told} (at {where}; --debug or AUTOSAC_DEBUG=1 shows the whole traceback)")


def _told(error: BaseException, limit: int) -> str:
    """Its type and message on one line."""
    message = one_line(error)
    if len(message) > limit:
        message = message[: limit - 3] + "..."
    kind = type(error).__name__
    return message if message == kind else f"{kind}: {message}"
