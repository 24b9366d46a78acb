"""One rank of a script while it runs: its capture, its memory and its clock, put together."""

from __future__ import annotations

import contextlib
import gc
import hashlib
import json
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch

from autosac.capture.compiler import partition
from autosac.capture.cuda import functions, graphs
from autosac.capture.device import device as simulated
from autosac.capture.device import dynamic, exchanged, values
from autosac.capture.device.device import CUDA
from autosac.capture.device.elements import SINGLE
from autosac.capture.device.precision import cudnn_allows_tf32, matmul_allows_tf32
from autosac.capture.jobs.accumulated import Accumulation
from autosac.capture.jobs.routing import routing_of
from autosac.capture.jobs.script import ScriptSteps, StopScript
from autosac.capture.jobs.script_graphs import ScriptGraphs
from autosac.capture.jobs.script_model import ModelFinder, check_names, owned_by_modules
from autosac.capture.jobs.session import CaptureSession
from autosac.capture.jobs.transforms import apply_plan_file, checkpointing_of, observe_candidates
from autosac.capture.moe_load import MoELoad, Routing
from autosac.capture.patches import meshes, process_group, synthetic
from autosac.capture.patches import scripts as script_patches
from autosac.errors import UsageError
from autosac.integrations import optimizer_slices
from autosac.integrations.operators import modules
from autosac.memory_sim.allocator import OutOfMemoryError
from autosac.scripts import profiler
from autosac.scripts.alike import operators
from autosac.scripts.clock import SimulatedClock
from autosac.scripts.devices import check_devices
from autosac.scripts.differences import StepDifferences, StepSize
from autosac.scripts.exchange import Exchange
from autosac.scripts.executed import Mark
from autosac.scripts.memory import ScriptMemory
from autosac.scripts.models import ModelShares
from autosac.scripts.ranks import ranks_of
from autosac.scripts.request import TRACE, ScriptOutcome, ScriptRequest
from autosac.scripts.shelf import SharedShelf
from autosac.scripts.timing import CountedTimes, SkippedWaits, StepTimes
from autosac.simulation import Simulation, Target, simulation_of
from autosac.trace import HostWait, Op, Parallelism, Signature, Trace, TraceInfo

_LOSS_EXPONENT = 0.1
_MOST_STOPS = 3


class ScriptRun:
    """A `ScriptListener`. One per process, made before the script begins."""

    def __init__(self, request: ScriptRequest, target: Target, clock: SimulatedClock, trace_file: Path) -> None:
        self._request = request
        self._trace_file = trace_file
        self._exchange: Exchange | None = None
        self._target = target

        def follow_steps(session: CaptureSession) -> None:
            self._steps = self._followed(session)

        self._session = CaptureSession(target.gpu, CUDA, before=follow_steps)
        self._memory = ScriptMemory(self._session.recorder, target, unlimited=request.unlimited)
        self._times = StepTimes(self._present, self._simulated, self._has_changed, self._waited)
        self._kept: tuple[int, Trace] | None = None
        self._shown: Simulation | None = None  # the kept step, with those of other ranks
        self._notes: dict[str, None] = {}
        self._differences = StepDifferences()
        self._kinds: dict[Signature, int] = {}
        self._compared = 0, 0  # the step and its events when it was last compared with the reported one
        self._last_wait: Mark | None = None
        self._skipped: SkippedWaits | None = None
        self._searched = 0, 0  # a step, and its events among which waits have been looked for
        self._places = 0  # of memory, after the step before
        self._devices = 0  # known to be the process's own
        self.stopped = False
        self.leave: Callable[[], None] = lambda: None  # ends the process
        self._stops = 0
        functions.answer_from(self._memory)
        process_group.serve_scripts()
        shared = Path(request.shared) if request.shared is not None and request.world_size > 1 else None
        if shared is not None:
            self._exchange = Exchange(shared, request.rank, request.shown, request.only)
            exchanged.exchange_with(self._exchange)
            process_group.share_store(
                SharedShelf(shared, request.rank, request.shown), request.rank, request.world_size
            )
        meshes.install(request.rank)
        script_patches.install(self._session.mode, self._note, checkpoints=request.checkpoints, shared=shared)
        profiler.install(self._note, self._to_show)
        if request.synthetic is not None:
            synthetic.install(synthetic.columns_of(request.synthetic), self._note)
        values.assume_floats(self._assumed, self._fallen)
        dynamic.on_assumption(self._note)
        self._device_clock = CountedTimes(self._present) if request.is_changed else self._times
        simulated.set_clock(self._device_clock)
        self._clock = clock
        self._finder = self._model_finder()
        if request.optimizer_slice_bytes and request.plan_file is None:  # a plan says it itself
            optimizer_slices.slice_optimizers(request.optimizer_slice_bytes)
        self._models = ModelShares(lambda: self._memory.allocator.active_bytes)
        self._model = 0  # that plans are for, in the kept step
        if not request.is_changed:
            self._models.install()
        self._routing = self._drawn_routing()
        self._accumulation: Accumulation | None = None
        if request.fast_forward:
            self._steps.forward.install()
        elif not request.every_microbatch:
            session = self._session
            self._accumulation = Accumulation(session.mode, session.recorder, self._steps, self.operator_ran)

    def _model_finder(self) -> ModelFinder:
        """Finds the model that is observed, or follows a plan, and all pipeline stages."""
        request, recorder = self._request, self._session.recorder

        def change(model: torch.nn.Module) -> None:
            if not request.is_changed:
                return
            # The recorder finds the first model by itself, but not one that nobody calls: its parts would be taken for models.
            if request.model or isinstance(model, (torch.nn.ModuleList, torch.nn.ModuleDict)):
                recorder.add_model(model)
            check_names(recorder.model_parts)
            if request.observe:
                observe_candidates([model], recorder)
            else:
                apply_plan_file(model, str(request.plan_file), recorder, strictly=False)

        finder = ModelFinder(change, compiles=not request.observe, wanted=request.model)
        finder.meet_stages(recorder.add_model)
        recorder.adopts = not request.model
        if request.is_changed:
            finder.install()
            finder.meet_what_is_called()
        return finder

    def _drawn_routing(self) -> Routing | None:
        """The random routing of tokens to experts; None if it is balanced."""
        load = MoELoad.parse(self._request.moe_load)
        if load.is_balanced:
            return None
        routing = routing_of(load, self._request.rank, self._session.recorder)
        values.route_by(routing)
        return routing

    def _note(self, text: str) -> None:
        self._notes[text] = None

    def _assumed(self) -> float:
        """What stands for a single number that the script reads, and that nothing is known of."""
        self._note(
            "losses and norms that the script reads are invented: finite numbers that fall slowly, cross entropies from the "
            f"logarithm of the number of classes, errors as of targets of size 1, others from {SINGLE:g}"
        )
        return SINGLE * self._fallen()

    def _fallen(self) -> float:
        return float((1 + self._steps.complete) ** -_LOSS_EXPONENT)

    def _followed(self, session: CaptureSession) -> ScriptSteps:
        """The steps of a session, whose operators they hear of from now on."""
        steps = ScriptSteps(session.recorder, self, self._request.period, self._request.marker)
        steps.install()
        session.mode.log = steps
        graphs.tell(ScriptGraphs(steps, session.recorder, self._follow, self._skip))
        return steps

    def _follow(self) -> None:
        if self._request.is_changed:
            raise UsageError("no plan can be made for a script that captures CUDA graphs: plan it without them")
        self._memory.follow()

    def _skip(self) -> None:
        self._memory.skip()

    @property
    def steps(self) -> int:
        """Steps that have begun."""
        return self._steps.number

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        """The script runs inside."""
        warnings.filterwarnings(
            "ignore", message="Using `torch.compile\\(module\\)` when there are global hooks"
        )  # ours
        with self._session.active():
            if self._accumulation is not None:
                self._accumulation.begin()
            if not self._request.is_changed:  # nobody sees its clock
                self._session.recorder.log.begin()
            self._clock.start(self._device_clock.elapsed_s)
            yield

    def so_far(self, note: str) -> ScriptOutcome | None:
        """How a script that goes no further is ended; None if no step is complete."""
        if self._kept is None:
            return None
        self._note(note)
        return self._outcome(0)

    def finish(self, exit_code: int) -> ScriptOutcome:
        """Say how the script has ended."""
        if not exit_code:
            self._steps.finish()
        return self._outcome(exit_code)

    def _outcome(self, exit_code: int) -> ScriptOutcome:
        if self._kept is not None and not exit_code and not self._trace_file.exists():
            self._kept[1].save(self._trace_file)
        return ScriptOutcome(
            exit_code=exit_code,
            steps=self._steps.complete,
            kept=self._kept[0] if self._kept is not None else 0,
            error="" if exit_code else self._why_nothing(),
            notes=(*self._notes, *self._differences.notes()),
            model=self._model,
        )

    def _note_step(self, trace: Trace) -> None:
        """What was assumed in the step that is kept."""
        routes = {i for i, signature in enumerate(trace.signatures) if signature.name.startswith("aten.topk")}
        if any(type(event) is Op and event.signature in routes and event.module for event in trace.events):
            self._note(_what_is_chosen(self._request.moe_load))
        if self._request.stand_ins:
            self._note(f"stand-ins replace kernels: {', '.join(self._request.stand_ins)}")
        if _trains_on_host(self._session.recorder.optimizers.values()):
            self._note("the optimizer's step on the host takes no simulated time")
        if trace.info.compiled:
            self._note("the time of compiling is not simulated")
        for note in partition.left_out():
            self._note(note)

    def _why_nothing(self) -> str:
        """Why there is no step, or no model to plan for; empty if there is."""
        if self._kept is not None:
            if self._found is not None or not self._request.observe:
                return ""
            return "the script calls no module that it trains: there is nothing that a plan could checkpoint"
        recorder, request = self._session.recorder, self._request
        if not recorder.storages.storages or self._steps.complete:
            return (
                "the script has put nothing on the GPU: it trains on the CPU, or in a process of its own. Nothing was "
                'simulated; is its device "cuda"?'
            )
        return (
            "the script has ended before its first step was complete: a step ends with the step() of a torch.optim "
            "optimizer, or, without one, when parameters change after a backward (--step-marker names a function that ends "
            "one). What it trains in processes of its own is not seen"
        ) + (f"; --optimizer-steps {request.period} takes so many of them as one" if request.period > 1 else "")

    # ---- ScriptListener ---------------------------------------------------------------------------------------------

    def model_called(self, module: torch.nn.Module) -> None:
        """Where a part of the model is called by itself, the model is recorded: nobody calls it, and the part would be taken
        for it.
        """
        if self._accumulation is not None:
            self._accumulation.watch(module)
        model, recorder = self._found, self._session.recorder
        if model is None or model is module or recorder.model_parts:
            return
        if any(part is module for part in model.modules()):
            recorder.add_model(model)

    def step_ended(self, number: int) -> None:
        """Keep it, if it is the one to keep, or none better has come yet, and it has done anything on the device."""
        if self._steps.forward.active:
            self._times.end(number)
            return
        operators = sum(type(event) is Op for event in self._session.recorder.log.events)
        if not operators:
            return
        self._device_clock.end(number)
        self._memory.follow()
        if number <= self._steps.kept and self._memory.places > self._places:
            # streams that PyTorch shares out in turn, which it does until each has memory
            self._steps.pass_over(number)
            self._memory.remember_products()
        self._places = self._memory.places
        calls = self._calls()
        if number > self._steps.kept:
            step_ms = self._times.price(number) if self._differences.are_many(calls) else None
            self._differences.add(StepSize(number, self._memory.step_peak_bytes, step_ms))
        if number <= self._steps.kept:
            simulation = self._simulation(self._left_alone())
            self._kept = number, simulation.trace
            self._model = self._models.largest
            if number == self._steps.kept:
                simulation.trace.save(self._trace_file)
                self._note_step(simulation.trace)
                if self._request.rank != self._request.shown or self._request.is_changed:
                    return  # nobody sees its clock, and the others' steps are those without a plan
                shown = self._shown = self._together(simulation)
                self._times.keep(shown, simulation.step_ms)
                size = StepSize(number, self._memory.step_peak_bytes, shown.step_ms)
                self._differences.report(size, calls, self._calls(self._steps.over_at))
                if self._request.fast_forward:
                    self._skip_from(number)

    def _calls(self, events: int | None = None) -> Counter[int]:
        """The operators of the step under way, or among its first events, by kind."""
        recorder = self._session.recorder
        return operators(recorder.log.events[:events], recorder.signatures.finished(), self._kinds)

    def _has_changed(self) -> bool:
        """Whether the step under way, whose optimizer has stepped, does something else than the reported one."""
        steps = self._steps
        place = steps.number, len(self._session.recorder.log.events)
        if not steps.is_over or steps.forward.active or place == self._compared:
            return False
        self._compared = place
        return self._differences.are_many(self._calls(), ended=False)

    def _skip_from(self, number: int) -> None:
        self._steps.forward.begin(len(self._session.recorder.log.events))
        self._skipped = SkippedWaits(self._times.mark)
        simulated.set_log(self._skipped)
        self._note(
            f"steps after step {number} are not computed: each takes as long as that one, also where the script evaluates"
        )

    def _together(self, simulation: Simulation) -> Simulation:
        """The step with those of other distinct ranks; alone where another optimizer has taken over, of which they may know
        nothing yet.
        """
        if self._exchange is None or self._shown is not None:
            return simulation
        others = [Trace.load(folder / TRACE, trusted=True) for folder in self._exchange.together()]
        return ranks_of((simulation.trace, *others), self._target)[0] if others else simulation

    def taken_over(self, number: int) -> None:
        """Its next step is reported, in place of the one before."""
        if self._steps.forward.active:
            self._note(f"another optimizer trains from step {number} on, of which nothing is computed (--fast-forward)")
        else:
            self._note(f"another optimizer trains from step {number} on: a step of that is reported")

    def step_begun(self, number: int) -> None:
        """Time goes on from the end of the last one."""
        self._memory.begin_step()
        self._models.begin_step()
        self._device_clock.begin(number)
        if self._routing is not None:
            self._routing.begin_step()
        if number <= self._steps.kept:
            gc.collect()  # a capture shall not depend on when Python collects

    def forward_begun(self, number: int) -> None:
        """Stop, if that was enough: not before a forward, so that the last step's own output is complete."""
        wanted = self._request.steps
        if wanted and number > max(wanted + self._steps.warm_up, self._steps.kept):
            self.stopped = True
            self._stops += 1
            if self._stops > _MOST_STOPS:  # the script catches everything
                self.leave()
            raise StopScript

    def operator_ran(self) -> None:
        """Follow the allocator; torch.OutOfMemoryError where it runs out."""
        if not torch.cuda.is_initialized():
            torch.cuda.init()  # as the first real kernel does
        devices = self._session.recorder.storages.devices
        if len(devices) != self._devices:
            self._devices = len(devices)
            check_devices(devices, self._request)
        try:
            self._memory.follow()
        except OutOfMemoryError as e:
            raise torch.OutOfMemoryError(self._memory.out_of_memory_message(e)) from None

    # ---- the simulation so far --------------------------------------------------------------------------------------

    def _present(self) -> tuple[int, int]:
        if self._steps.forward.active:
            return self._steps.number, self._steps.forward.events
        log = self._session.recorder.log
        return self._steps.number, len(log.events) if log.has_begun else 0

    def _waited(self) -> Mark | None:
        """Where in the step under way the host last waited for all that it had issued, to a stream or to all."""
        step, events = self._present()
        if self._skipped is not None:
            last = self._skipped.last
            return last if last is not None and last.step == step else None
        if step != self._searched[0]:
            self._last_wait, self._searched = None, (step, 0)
        for place in range(self._searched[1], events):
            event = self._session.recorder.log.events[place]
            if type(event) is HostWait and event.event < 0:
                self._last_wait = Mark(step, place, event.stream)
        self._searched = step, events
        return self._last_wait

    def _to_show(self) -> Simulation | None:
        """The kept step, or what there is before it; None if there is nothing."""
        return self._shown or (self._simulation() if self._steps.number else None)

    def _simulation(self, notes: tuple[str, ...] = ()) -> Simulation:
        """The step that is recorded now, as far as it has come."""
        return self._simulated(lambda trace: trace, notes)

    def _simulated(self, part: Callable[[Trace], Trace], notes: tuple[str, ...] = ()) -> Simulation:
        """A part of what is recorded now."""
        return simulation_of(part(self._session.recorder.trace(self._info(notes))), self._target)

    def _info(self, notes: tuple[str, ...]) -> TraceInfo:
        recorder, request = self._session.recorder, self._request
        parts: list[Any] = recorder.model_parts
        shapes = modules.shapes_by_name(parts) if parts else {}
        return TraceInfo(
            job_fingerprint=hashlib.sha256(json.dumps(shapes, sort_keys=True).encode()).hexdigest(),
            model=modules.class_name(parts[0]) if parts else "",
            gpu=self._target.gpu.name,
            torch_version=torch.__version__,
            world_size=request.world_size,
            rank=request.rank,
            parameter_shapes=shapes,
            **checkpointing_of(parts, request.plan_file),
            compiled=any(map(modules.has_compiled, parts)) or self._finder.is_compiled,
            parallelism=Parallelism(pp=max(len(parts), 1)),  # only stages are several parts
            optimizer_slice_bytes=optimizer_slices.in_force(),
            matmul_allows_tf32=matmul_allows_tf32(),
            cudnn_allows_tf32=cudnn_allows_tf32(),
            notes=notes,
        )

    @property
    def _found(self) -> torch.nn.Module | None:
        """The model that is observed, or follows a plan, or its first pipeline stage."""
        return self._finder.model

    def _left_alone(self) -> tuple[str, ...]:
        """What plans do not decide about."""
        model = self._found
        if model is None or not self._request.is_changed:
            return ()
        of_model = {id(p) for part in self._finder.parts for p in part.parameters()}
        groups = [group for optimizer in self._session.recorder.optimizers.values() for group in optimizer.param_groups]
        trained = [p for group in groups for p in group["params"]]
        others = [p for p in trained if id(p) not in of_model]
        owned = owned_by_modules() if others else set()  # not an optimizer's own copies
        outside = sum(p.numel() for p in others if id(p) in owned)
        if not outside:
            return ()
        share = f"{outside / sum(p.numel() for p in trained):.0%} of what is trained"
        return (f"plans are for {modules.class_name(model)}; modules outside of it, with {share}, stay as they are",)


def _trains_on_host(optimizers: Iterable[torch.optim.Optimizer]) -> bool:
    """Whether an optimizer updates parameters that are in the host's memory."""
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    return any(p.device.type == "cpu" for group in groups for p in group["params"])


def _what_is_chosen(load: str) -> str:
    """Of the indices that topk returns: experts of tokens, neighbours of points, ..."""
    if MoELoad.parse(load).is_balanced:
        return "what topk chooses (experts, neighbours) is assumed to be spread evenly (--moe-load)"
    return f"expert load imbalance: {load} (--moe-load)"
