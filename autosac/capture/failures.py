"""Why a job could not be captured, in one line."""

from __future__ import annotations

from autosac.capture.sources import innermost_line
from autosac.errors import AutosacError, CaptureError

# What a job raises where it cannot run, and what a plan's wrapper warns of where the job does not follow the plan.
EXPLAINED = (AssertionError, ValueError, RuntimeError, NotImplementedError, TypeError, ImportError, UserWarning)


def one_line(error: BaseException) -> str:
    """An error's message without line breaks; its type if it has none."""
    return " ".join(str(error).split()) or type(error).__name__


def explain(error: BaseException, doing: str) -> AutosacError:
    """A CaptureError that names the call in the user's or model's code where capture failed, and what to do.

    An AutosacError is its own explanation.
    """
    if isinstance(error, AutosacError):
        return error
    where = innermost_line(error.__traceback__)
    message = one_line(error)
    if len(message) > 400:
        message = message[:397] + "..."
    return CaptureError(f"{doing}: {type(error).__name__}: {message} (at {where}; --debug shows the whole traceback)")
