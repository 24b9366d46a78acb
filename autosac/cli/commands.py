"""The commands of the command line, each a function of the parsed arguments."""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from autosac.call_stack import with_room
from autosac.capture.moe_load import MoELoad
from autosac.cli.bench import bench
from autosac.cli.cache import cache
from autosac.cli.calibrate import calibrate
from autosac.cli.catalogue import clusters, gpus
from autosac.cli.chakra import chakra, check_chakra, export_chakra
from autosac.cli.completion import completion
from autosac.cli.progress import progress_line
from autosac.cli.script import script
from autosac.cli.search import search
from autosac.cli.simulated import check_pictures, simulation_document, with_models, write_pictures
from autosac.display.picture_needs import check_drawable
from autosac.errors import CaptureError, InfeasibleError, SimulationError, TraceError, UsageError
from autosac.files.writing import check_outputs, is_special
from autosac.jobs.batches import BatchPlan, plan_batches
from autosac.jobs.expert_load import plan_over_draws, representative, statistics
from autosac.jobs.levers import Pulled, plan_with_levers
from autosac.jobs.tasks import BASELINES, TitanJob, plan_titan_job, simulate_draws, simulate_job, simulation_of
from autosac.limits import MOST_BATCH, MOST_BUDGETS, parse_whole
from autosac.planning.closed_loop import Goal, Planned
from autosac.planning.confidence import Confidence, confidence_of
from autosac.plans import Plan
from autosac.plans.diff import compare_plans
from autosac.quantities import parse_budget
from autosac.report import summaries as reports
from autosac.report.idle_tables import idle_table
from autosac.report.time_tables import time_document, time_tables
from autosac.simulation import TITAN_ALLOCATOR, Simulation, Target
from autosac.trace import Trace, is_capture

_DRAWS = 8
_DEFAULT_BUDGET = "85%"
_LEVERS_HINT = "- --levers quick simulates other settings of the job that may make this step faster"
# New objects before Python looks for garbage among them; among older ones it hardly ever looks.
_COLLECTIONS = (10_000_000, 1_000, 1_000)


@with_room
def run(arguments: argparse.Namespace) -> None:
    """Run the command that was asked for."""
    check_drawable(arguments)
    known = (plan, simulate, script, explain, diff, search, bench, calibrate, chakra, gpus, clusters, cache, completion)
    function = {function.__name__: function for function in known}[arguments.run]
    with contextlib.nullcontext() if function in (bench, calibrate) else collecting_rarely():  # these run models here
        function(arguments)


@contextlib.contextmanager
def collecting_rarely() -> Iterator[None]:
    """Let Python look for garbage less often: of traces, which are many small tuples, hardly anything ever is, and by default
    all of them would be gone through again and again.
    """
    before = gc.get_threshold()
    gc.set_threshold(*_COLLECTIONS)
    try:
        yield
    finally:
        gc.freeze()
        gc.unfreeze()  # what is left is old now, and not gone through once more
        gc.set_threshold(*before)


def _job(arguments: argparse.Namespace, progress: Any) -> TitanJob:
    return TitanJob.of(
        arguments.job,
        gpu=arguments.gpu,
        world_size=arguments.world_size,
        overrides=arguments.overrides,
        rank=arguments.rank or 0,
        cluster=arguments.cluster,
        allocator=arguments.alloc_conf,
        power_limit_w=arguments.power_limit,
        moe_load=_moe_load(arguments),
        debug=arguments.debug,
        use_cache=not arguments.no_cache,
        progress=progress,
    )


def _moe_load(arguments: argparse.Namespace) -> MoELoad:
    try:
        load = MoELoad.parse(arguments.moe_load)
    except UsageError as e:
        raise UsageError(f"--moe-load {arguments.moe_load}: {e}") from None
    return replace(load, seed=arguments.moe_seed)


def _draws(arguments: argparse.Namespace) -> int:
    """Number of draws of the expert load; 0: it is balanced, nothing is drawn."""
    drawn = not _moe_load(arguments).is_balanced
    if not drawn and (arguments.moe_draws is not None or arguments.moe_seed):
        raise UsageError("--moe-draws and --moe-seed need --moe-load uniform, untrained, power-law or zipf")
    return (arguments.moe_draws or _DRAWS) if drawn else 0


def plan(arguments: argparse.Namespace) -> None:
    """``autosac plan``: one budget, or several, or one and the best local batch size."""
    several = _several(arguments)
    check_outputs(
        (
            ("-o", arguments.output),
            ("--pareto-html", arguments.pareto_html),
            ("--pareto-png", arguments.pareto_png),
        ),
        (Path(arguments.job),),
    )
    sizes = _batch_sizes(arguments)
    draws = _draws(arguments)
    if draws and (several or arguments.maximize or arguments.confidence is not None):
        raise UsageError("--moe-load needs one budget, without --budgets, --pareto, --maximize and --confidence")
    if arguments.levers != "off" and (several or arguments.maximize or draws):
        raise UsageError("--levers needs one budget, without --budgets, --pareto, --maximize and --moe-load")
    batch: BatchPlan | None = None
    pulled: Sequence[Pulled] = ()
    with progress_line(enabled=not arguments.quiet and not arguments.debug) as progress:
        job = _job(arguments, progress)
        goal, budgets = _goals(arguments, job.target)
        confidence = _confidence(arguments, job.target)
        if arguments.maximize:
            batch = plan_batches(job, goal, sizes, confidence)
            results: Sequence[Planned | InfeasibleError] = [batch.planned]
        elif draws:
            results = [plan_over_draws(job, goal, draws)]
        elif arguments.levers != "off":
            planned, pulled = plan_with_levers(
                job, goal, arguments.levers, confidence, all_stages=arguments.rank is None
            )
            results = [planned]
        else:
            results = plan_titan_job(
                job,
                goal,
                budgets,
                pareto=arguments.pareto or 0,
                confidence=confidence,
                all_stages=arguments.rank is None,
            )
    found = [result for result in results if isinstance(result, Planned)]
    if not found:
        if pulled:
            _print_levers(None, pulled, arguments)
        raise next(result for result in results if isinstance(result, InfeasibleError))
    written = _write_plans(arguments.output, found, several)
    _write_pareto(arguments, found)
    if arguments.json:
        documents = [json.loads(planned.plan.to_bytes()) for planned in found]
        document = {"plan": documents[0], "tried": tried_document(batch)} if batch else documents[0]
        if arguments.levers == "off":
            print(json.dumps(documents if several else document, indent=1))
    else:
        _print_plans(results, several, batch, may_hint=arguments.levers == "off" and not draws)
    if arguments.levers != "off":
        _print_levers(found[0], pulled, arguments)
    if not arguments.json:
        for path in written:
            reports.console().print(f"plan written to {path}", soft_wrap=True)


def _print_plans(
    results: Sequence[Planned | InfeasibleError], several: bool, batch: BatchPlan | None, *, may_hint: bool
) -> None:
    """The report of several plans, or of one with what else was tried; `may_hint`: levers may be tried, and were not."""
    out = reports.console()
    found = [result for result in results if isinstance(result, Planned)]
    if several:
        out.print(reports.budgets_table(found))
        for result in results:
            if isinstance(result, InfeasibleError):
                out.print(f"- {result}")
    else:
        if batch:
            out.print(reports.batch_table(batch))
        out.print(reports.plan_summary(found[0].plan, found[0].notes))
        if may_hint and not batch and found[0].plan.units:
            out.print(_LEVERS_HINT)


def _print_levers(own: Planned | None, pulled: Sequence[Pulled], arguments: argparse.Namespace) -> None:
    """What other settings would give; as JSON with the plan, which is null where none fits."""
    if arguments.json:
        document = json.loads(own.plan.to_bytes()) if own else None
        print(json.dumps({"plan": document, "levers": levers_document(pulled)}, indent=1))
    elif pulled:
        reports.console().print(reports.lever_table(own, pulled, arguments.budget_kind))
    else:
        reports.console().print("- there is no lever to try: the job has those that --levers asks for")


def tried_document(batch: BatchPlan) -> list[dict[str, Any]]:
    """The local batch sizes that were tried, as JSON."""
    return [
        {
            "local_batch_size": trial.local_batch_size,
            "gradient_accumulation_steps": batch.sizes.accumulation(trial.local_batch_size),
            "outcome": trial.outcome,
            "full_peak_bytes": trial.least_bytes,
            "none": trial.unplanned._asdict() if trial.unplanned else None,
            "tokens_per_second": trial.tokens_per_second if trial.planned else None,
            "prediction": asdict(trial.planned.plan.predictions["autosac"]) if trial.planned else None,
        }
        for trial in batch.trials
    ]


def levers_document(pulled: Sequence[Pulled]) -> list[dict[str, Any]]:
    """What other settings would give, as JSON."""
    return [
        {
            "name": one.name,
            "how": one.how,
            "changes": one.numbers,
            "failure": one.failure,
            "tokens_per_second": one.tokens_per_second or None,
            "prediction": asdict(one.planned.plan.predictions["autosac"]) if one.planned else None,
        }
        for one in pulled
    ]


def _goals(arguments: argparse.Namespace, target: Target) -> tuple[Goal, list[int]]:
    """What is asked for, and the budgets if there are several."""
    gpu_bytes = target.hardware.usable_bytes
    goal = Goal(
        budget_bytes=parse_budget(_DEFAULT_BUDGET if arguments.budget is None else arguments.budget, gpu_bytes),
        budget_kind=arguments.budget_kind,
        solver=arguments.solver,
        curve=arguments.curve,
        milp=arguments.milp,
        time_limit_s=arguments.time_limit,
        gap=arguments.gap,
        offload=arguments.offload,
        chunk_loss=arguments.chunk_loss,
    )
    texts = [] if arguments.budgets is None else arguments.budgets.split(",")
    if len(texts) > MOST_BUDGETS:
        raise UsageError(f"{len(texts)} budgets: at most {MOST_BUDGETS} are planned at once")
    budgets = [parse_budget(text, gpu_bytes) for text in texts]
    if len(set(budgets)) < len(budgets):
        raise UsageError("a budget is given twice")
    return goal, budgets


def _confidence(arguments: argparse.Namespace, target: Target) -> Confidence | None:
    """The probability of fitting that is asked for. UsageError if it is none, or there is no budget to keep a margin of."""
    if arguments.confidence is None:
        return None
    if arguments.pareto:
        raise UsageError("--confidence needs a budget to keep a margin of: give --budget or --budgets, not --pareto")
    return confidence_of(arguments.confidence, arguments.budget_kind, target.allocator)


def _several(arguments: argparse.Namespace) -> bool:
    """Whether there is more than one budget. UsageError for what excludes each other."""
    if arguments.budgets is not None and arguments.pareto:
        raise UsageError("give --budgets or --pareto, not both")
    several = arguments.budgets is not None or bool(arguments.pareto)
    if several and arguments.budget is not None:
        raise UsageError(f"give --budget or {'--pareto' if arguments.pareto else '--budgets'}, not both")
    if (arguments.pareto_html or arguments.pareto_png) and not several:
        raise UsageError("a Pareto curve needs --budgets or --pareto")
    if several and arguments.maximize:
        raise UsageError("--maximize needs one budget, not --budgets or --pareto")
    return several


def _batch_sizes(arguments: argparse.Namespace) -> tuple[int, ...]:
    """The local batch sizes to choose from; none: all."""
    if arguments.batch_sizes is None:
        return ()
    if not arguments.maximize:
        raise UsageError("--batch-sizes needs --maximize tokens-per-second")
    found = [parse_whole(text.strip(), 1, MOST_BATCH) for text in arguments.batch_sizes.split(",")]
    sizes = tuple(size for size in found if size is not None)
    if len(sizes) < len(found):
        raise UsageError(
            f"batch sizes {arguments.batch_sizes!r}: expected whole numbers from 1 to {MOST_BATCH}, such as 4,8,12"
        )
    if len(set(sizes)) < len(sizes):
        raise UsageError("a batch size is given twice")
    return sizes


def _write_plans(output: Path | None, found: Sequence[Planned], several: bool) -> list[Path]:
    """One plan under the name given, several with their budgets in their names."""
    if output is None:
        return []
    written = []
    for planned in found:
        gib = planned.plan.made_for.budget_bytes / 2**30
        path = output
        if several and not is_special(output):
            path = output.with_name(f"{output.stem}-{gib:.4g}GiB{output.suffix}")
            if path in written:
                path = output.with_name(f"{output.stem}-{planned.plan.made_for.budget_bytes}B{output.suffix}")
        planned.plan.save(path)
        written.append(path)
    return written


def _write_pareto(arguments: argparse.Namespace, found: Sequence[Planned]) -> None:
    if arguments.pareto_html is None and arguments.pareto_png is None:
        return
    from autosac.report.pareto import pareto_html, pareto_png

    for path, draw in ((arguments.pareto_html, pareto_html), (arguments.pareto_png, pareto_png)):
        if path is not None:
            draw(path, [planned.plan for planned in found])


def diff(arguments: argparse.Namespace) -> None:
    """``autosac diff``."""
    a, b = Plan.load(arguments.a), Plan.load(arguments.b)
    differences = compare_plans(a, b)
    if arguments.json:
        print(json.dumps(asdict(differences), indent=1))
        return
    reports.console().print(reports.difference_tables(differences, str(arguments.a), str(arguments.b)))


def simulate(arguments: argparse.Namespace) -> None:
    """``autosac simulate``."""
    check_pictures(arguments, (Path(arguments.job), *([arguments.plan] if arguments.plan is not None else [])))
    check_chakra(arguments)
    with progress_line(enabled=not arguments.quiet and not arguments.debug) as progress, _naming_capture(arguments.job):
        drawn = _drawn(arguments, progress)
        simulation, others = (representative(drawn), {}) if drawn else _simulated(arguments, progress)
        target = with_models(simulation.target, arguments)
        drawn, others = (
            [one.on(target) for one in drawn],
            {mode: one if isinstance(one, CaptureError) else one.on(target) for mode, one in others.items()},
        )
        simulation = simulation.on(target)
        write_pictures(arguments, simulation, Plan.load(arguments.plan) if arguments.plan else None)
        exported = export_chakra(arguments, simulation)
        name = arguments.ac or (arguments.plan.name if arguments.plan else _what_is_simulated(arguments.job))
        if drawn and (load := simulation.trace.info.moe_load):
            name += f", draw {load.draw} of the expert load"
        summary = reports.simulation_summary(simulation, name)
    if arguments.json:
        document = simulation_document(simulation)
        if arguments.time:
            document["time"] = time_document(simulation)
        if others:
            document["beside"] = {
                mode: {"error": str(other)} if isinstance(other, CaptureError) else asdict(other.prediction())
                for mode, other in others.items()
            }
        if drawn:
            document["draws"] = [asdict(statistic) for statistic in statistics(drawn)]
        if exported:
            document["chakra"] = exported
        print(json.dumps(document, indent=1))
        return
    out = reports.console()
    out.print(summary)
    if exported:
        out.print("{ranks} Chakra traces of {nodes} nodes written to {folder}".format(**exported), soft_wrap=True)
    if drawn:
        out.print(reports.draws_table(statistics(drawn), arguments.moe_load, drawn))
    if arguments.time:
        out.print(time_tables(simulation))
    if arguments.memory:
        out.print(reports.memory_tables(simulation))
        out.print(idle_table(simulation.idle))
        if others:
            out.print(reports.mode_table(simulation, others))


@contextlib.contextmanager
def _naming_capture(job: str) -> Iterator[None]:
    """A saved capture that cannot be executed is a damaged file."""
    try:
        yield
    except SimulationError as e:
        if not is_capture(job):
            raise
        raise TraceError(f"{job} is damaged: {e}") from e


def _what_is_simulated(job: str) -> str:
    return f"the step captured in {Path(job).name}" if is_capture(job) else "the job as it is"


def _drawn(arguments: argparse.Namespace, progress: Any) -> list[Simulation]:
    """The job in several draws of its expert load; empty if that is balanced."""
    count = _draws(arguments)
    if not count:
        return []
    if is_capture(arguments.job):
        raise UsageError(f"{arguments.job} is a captured step: --moe-load needs the job")
    return simulate_draws(
        _job(arguments, progress),
        count,
        checkpointing=arguments.ac or "job",
        plan_file=str(arguments.plan) if arguments.plan else None,
        all_stages=arguments.rank is None,
    )


def _simulated(arguments: argparse.Namespace, progress: Any) -> tuple[Simulation, dict[str, Simulation | CaptureError]]:
    """The simulation that is asked for: of a job, or of a step that was captured before."""
    if is_capture(arguments.job):
        if arguments.plan or arguments.ac or arguments.overrides or arguments.rank is not None:
            raise UsageError(
                f"{arguments.job} is a captured step: --plan, --ac, --rank and TorchTitan's arguments need the job"
            )
        trace = Trace.load(arguments.job)
        world_size = trace.info.world_size
        if arguments.world_size is not None and arguments.world_size != world_size:
            raise UsageError(
                f"{arguments.job} was captured in a world of {world_size} GPUs: --world-size {arguments.world_size} "
                "needs the job"
            )
        allocator = TITAN_ALLOCATOR if arguments.alloc_conf is None else arguments.alloc_conf
        target = Target.of(
            arguments.gpu,
            world_size,
            cluster=arguments.cluster,
            allocator=allocator,
            power_limit_w=arguments.power_limit,
        )
        return simulation_of(trace, target), {}
    return simulate_job(
        _job(arguments, progress),
        checkpointing=arguments.ac or "job",
        plan_file=str(arguments.plan) if arguments.plan else None,
        beside=BASELINES if arguments.memory else (),
        all_stages=arguments.rank is None,
    )


def explain(arguments: argparse.Namespace) -> None:
    """``autosac explain``."""
    plan = Plan.load(arguments.plan)
    units = plan.units
    if arguments.module is not None:
        units = tuple(unit for unit in units if unit.fqn == arguments.module)
        if not units and plan.settings.job_checkpointing:
            raise UsageError(f"the plan is {plan.doing}, which makes no decisions about single modules")
        if not units:
            known = ", ".join(unit.fqn for unit in plan.units[:6]) or "none"
            raise UsageError(
                f"the plan does not checkpoint the module {arguments.module!r}; it checkpoints: {known}, ..."
            )
    if arguments.json:
        print(json.dumps([asdict(unit) for unit in units], indent=1))
        return
    out = reports.console()
    if arguments.module is None:
        out.print(reports.plan_summary(plan))
        if plan.reasons:
            out.print(reports.reasons_table(plan))
        shown: set[object] = set()
        for unit in units:
            if (unit.memory_budget, unit.decisions) not in shown:
                shown.add((unit.memory_budget, unit.decisions))
                out.print(reports.decision_table(unit, plan))
    else:
        out.print(reports.decision_table(units[0], plan))
