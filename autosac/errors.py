"""The errors that AutoSAC raises for its users. Broken invariants are assertions instead.

The command line prints the message of an AutosacError on one line and exits with its `exit_code`: 2 for wrong usage
(a bad argument or file), 1 for a job that cannot be done.
"""

from __future__ import annotations


class AutosacError(Exception):
    """Base of all errors that are meant for the user."""

    exit_code = 1


class UsageError(AutosacError, ValueError):
    """An argument, a file or a setting is wrong."""

    exit_code = 2


class TraceError(UsageError):
    """A file is not a trace, is damaged, or has another version."""


class PlanError(UsageError):
    """A file is not a plan, is damaged or has another version, or the plan was made for another model or job."""


class HardwareError(UsageError):
    """A GPU or cluster is unknown, or its profile is wrong."""


class CaptureError(AutosacError):
    """The job could not be captured. The message names the operator or call, and says what to do."""


class PlanNotFollowedError(PlanError, CaptureError):
    """A module of a running job cannot do what the plan says. In a capture: a policy that must not be proposed."""


class CaptureLostError(CaptureError):
    """The process that captured has ended before its answer. Nothing is known of the job, which may be captured again."""


class FirstStageError(CaptureError):
    """A later pipeline stage cannot be captured before it is known what the first one sends."""


class MicrobatchError(CaptureError):
    """A microbatch of a script proved unlike those that had been copied: all of them have to run."""


class TooFewLayersError(CaptureError):
    """There are too few equal layers for a capture with fewer of them: the smallest such capture is of the whole job."""


class SimulationError(AutosacError):
    """A trace cannot be executed (a deadlock, an event that never comes)."""


class InfeasibleError(AutosacError):
    """No plan meets the budget. The message says how large the budget must be, and where memory peaks.

    `peak_in`: where it peaks, whatever is recomputed: in the ``"loss"`` (forward or backward, outside of all modules), in the
    ``"optimizer"``, or elsewhere (empty).
    """

    def __init__(self, message: str, *, peak_in: str = "") -> None:
        super().__init__(message)
        self.peak_in = peak_in


class TimeLimitError(InfeasibleError):
    """No plan was found within the solver's time limit; there may be one."""
