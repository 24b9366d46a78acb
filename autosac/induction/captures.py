"""Captures of a job, of which only a few layers are really captured where its layers repeat.

`capturing` asks the capture process for three cuts of the job (`autosac.capture.jobs.layers`). Their traces must be a family:
two of them predict the third exactly (`traces`). If not, the next larger cut replaces the smallest, for the first copies of
a layer may still be special (with experts in FSDP units of their own the first two are, and what the third one frees); if the
cuts no longer pay, the whole job is captured. The trace is the same in every case.

Where the same job has been captured without checkpointing, its trace tells what has to be in one under checkpointing: then two
cuts are enough, if the trace that they predict agrees with it (`Reference`); if not, the third one is captured after all. The
two are the first ones of those that have predicted that trace: where its smallest cuts were still special, these are, too.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from typing import Protocol

from autosac.capture.failures import IN_A_STEP
from autosac.capture.process.server import CaptureFuture
from autosac.capture.request import TitanRequest
from autosac.errors import AutosacError, FirstStageError, TooFewLayersError
from autosac.induction.alignment import Refusal
from autosac.induction.traces import TraceFamily, difference, ends_once
from autosac.plans import Plan
from autosac.plans.layers import is_alike
from autosac.trace import Cut, Trace, TraceInfo

_CUTS = 3
_MOST_CUTS = 5


class Server(Protocol):
    """Who captures; see `autosac.capture.process.server.CaptureServer`."""

    def submit(self, request: TitanRequest) -> Future[Trace]: ...
    def cancel(self, future: Future[Trace]) -> None: ...


class Reference(Protocol):
    """The job's step without checkpointing, as far as it tells what must be in one under checkpointing."""

    def first_cut(self) -> int:
        """The number of the first cut of those that it was put together from; 0 if it was captured whole."""

    def agrees(self, trace: Trace) -> bool:
        """Whether a trace under checkpointing is that without, but for what checkpointing accounts for."""


class Capturing:
    """A capture under way, of a whole job from its cuts.

    `refused` gets the reason, in one line, if the cuts turn out to be no family. `reference`: see the module's docstring.
    """

    def __init__(
        self,
        server: Server,
        request: TitanRequest,
        refused: Callable[[str], None],
        reference: Reference | None = None,
    ) -> None:
        self._server = server
        self._request = request
        self._refused = refused
        self._reference = reference
        self._first = 0
        self._futures = [self._submit(cut) for cut in range(_CUTS - (reference is not None))]
        self._trace: Trace | None = None
        self._error: AutosacError | None = None
        self._lock = threading.Lock()

    def go_ahead(self) -> None:
        """Put the trace together in another thread as soon as the cuts are there, and have another one captured if they are no
        family, rather than when `result` is asked for.
        """
        threading.Thread(target=self._try, daemon=True).start()

    def cancel(self) -> None:
        """End the captures of the cuts: nobody needs the trace any more."""
        for future in self._futures:
            self._server.cancel(future)

    def _try(self) -> None:
        with contextlib.suppress(Exception):  # whoever asks for the result gets the error
            self.result()

    def first_cut(self) -> int:
        """The number of the first cut of those that the trace was put together from; 0 if it was captured whole."""
        self.result()
        return self._first

    def _agreed(self, cuts: list[Trace], reference: Reference) -> Trace | None:
        """The trace that the first two cuts predict which are like others, if it agrees with what is known. All cuts that are
        captured for that are in `cuts` afterwards.
        """
        first = reference.first_cut()
        while len(cuts) < min(first + 2, _MOST_CUTS):
            cuts.append(self._submit(len(cuts)).result())
        try:
            trace = predicted(cuts[first : first + 2])
        except Refusal:
            return None
        return trace if reference.agrees(trace) else None

    def _submit(self, cut: int | None) -> Future[Trace]:
        return self._server.submit(replace(self._request, cut=cut))

    def result(self) -> Trace:
        """The job's trace. An AutosacError if it cannot be captured."""
        with self._lock:
            if self._error is not None:
                raise self._error
            if self._trace is None:
                try:
                    self._trace = self._result()
                except AutosacError as e:
                    self._error = e
                    raise
            return self._trace

    def early(self) -> TraceInfo:
        """See `autosac.capture.process.server.CaptureFuture.early`."""
        try:
            return early_info(self._futures[0])
        except AutosacError:  # as in `result`
            return self.result().info

    def _result(self) -> Trace:
        reason = ""
        try:
            cuts = [self._futures[0].result()]
            if cuts[0].info.cut is None:
                return cuts[0]
            cuts += [future.result() for future in self._futures[1:]]
            if self._reference is not None:
                trace = self._agreed(cuts, self._reference)
                if trace is not None:
                    return trace
                cuts.append(self._submit(len(cuts)).result())
            while True:
                try:
                    trace = joined(cuts[-_CUTS:])
                except Refusal as e:
                    reason = str(e)
                else:
                    self._first = len(cuts) - _CUTS
                    return trace
                if len(cuts) == _MOST_CUTS or not _pays(cuts):
                    break
                cuts.append(self._submit(len(cuts)).result())
        except FirstStageError:  # all layers would need the same
            raise
        except AutosacError as e:  # perhaps the job cannot be built with so few layers
            reason = str(e)
            if isinstance(_error_of(self._futures[1]), TooFewLayersError):
                raise  # the smallest was of all layers
            if reason.startswith(IN_A_STEP) and all(str(_error_of(future)) == reason for future in self._futures):
                raise  # with more layers it is the same
        self._refused(f"capturing all layers ({reason[:100]})")
        return self._submit(None).result()


def _error_of(future: Future[Trace]) -> AutosacError | None:
    try:
        future.result()
    except AutosacError as e:
        return e
    return None


def capturing(
    server: Server,
    request: TitanRequest,
    refused: Callable[[str], None] = lambda _: None,
    *,
    whole: bool = False,
    reference: Reference | None = None,
) -> Capturing | Future[Trace]:
    """Start a capture; `result()` waits for its trace. It is of the whole job if asked for, and under a plan that does not do
    the same in all layers, unless two cuts are to be enough: then kinds of layers decide (`autosac.capture.jobs.layers`).
    So it is where optimizers work in slices.
    `reference`: see `Capturing`.
    """
    if whole or request.layers is not None or _needs_all_layers(request):
        return server.submit(request)
    return Capturing(server, request, refused, reference)


def _needs_all_layers(request: TitanRequest) -> bool:
    """Whether cuts would not tell the whole. Slices of an optimizer end where they are full, wherever layers end."""
    if request.plan_file is None:
        return request.optimizer_slice_bytes > 0
    plan = Plan.load(request.plan_file)
    return plan.settings.optimizer_slice_bytes > 0 or (request.cuts == _CUTS and not is_alike(plan))


def early_info(capture: Capturing | Future[Trace]) -> TraceInfo:
    """What other stages' captures need of a capture under way; of one that cannot tell, its trace's info."""
    return capture.early() if isinstance(capture, (Capturing, CaptureFuture)) else capture.result().info


def _pays(cuts: list[Trace]) -> bool:
    """Whether another cut is still clearly smaller than the job."""
    count, period, total = _cut(cuts[-1])
    return 2 * (count + period) <= total


def joined(cuts: list[Trace]) -> Trace:
    """The trace of the whole job, from those of three cuts of it. Refusal if two of them do not predict the third."""
    bare = _bare(cuts)
    family = TraceFamily(bare[:2])
    wrong = difference(family.member(2), bare[2])
    if wrong is not None:
        raise Refusal(wrong)
    return _whole(family, cuts)


def predicted(cuts: list[Trace]) -> Trace:
    """The trace of the whole job as two cuts of it predict it. Refusal if they cannot."""
    return _whole(TraceFamily(_bare(cuts)), cuts)


def _bare(cuts: list[Trace]) -> list[Trace]:
    return [replace(cut, info=replace(cut.info, cut=None)) for cut in cuts]


def _whole(family: TraceFamily, cuts: list[Trace]) -> Trace:
    first, period, total = _cut(cuts[0])
    whole = family.member((total - first) // period)
    if not ends_once(whole):
        raise Refusal("a storage ends where it is not alive")
    return whole


def _cut(trace: Trace) -> Cut:
    assert trace.info.cut is not None
    return trace.info.cut
