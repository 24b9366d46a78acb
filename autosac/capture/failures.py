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
    message = one_line(error)
    if len(message) > _LIMIT:
        message = message[: _LIMIT - 3] + "..."
    kind = type(error).__name__
    prefix = "" if message == kind else f"{kind}: "
    return CaptureError(
        f"{doing}: {prefix}{message} (at {where}; --debug or AUTOSAC_DEBUG=1 shows the whole traceback)"
    )
