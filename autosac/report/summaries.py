"""What people read in the terminal. Figures come in; tables go out (rich honours NO_COLOR and plain pipes)."""

from __future__ import annotations

import io
import math
from collections.abc import Mapping, Sequence

from rich.console import Console, Group, RenderableType
from rich.panel import Panel
from rich.text import Text

from autosac.display.module_names import alike, natural, span, without_numbers
from autosac.display.tables import Table, fact_grid, output_width
from autosac.display.terminal import PlainConsole
from autosac.errors import CaptureError
from autosac.jobs.batches import BatchPlan
from autosac.jobs.expert_load import Statistic
from autosac.jobs.levers import Pulled
from autosac.memory_sim import Category, PeakReport
from autosac.planning.closed_loop import Planned
from autosac.plans import Decision, Plan, Prediction, Unit
from autosac.plans.diff import PlanDifference
from autosac.plans.reasons import price_of, why
from autosac.quantities import format_bytes, format_ms, format_probability
from autosac.report.time_tables import served_line
from autosac.simulation import Simulation

_BUFFERED = (
    "two ranks send to each other before they receive: NCCL goes on only since its buffers hold the messages, and hangs with "
    "larger ones; batch_isend_irecv never does"
)
POLICY_NAMES = {"autosac": "AutoSAC", "none": "no checkpointing", "full": "full", "selective-op": "selective-op"}


def console() -> Console:
    """Standard output; where it is no terminal, as wide as $COLUMNS says, or 80 columns."""
    out = PlainConsole()
    return out if out.is_terminal else PlainConsole(width=output_width())


def text_of(report: RenderableType) -> str:
    """A report as text without colours, as it is printed where there is no terminal."""
    lines = io.StringIO()
    PlainConsole(file=lines, width=output_width(), color_system=None, force_terminal=False).print(report)
    return lines.getvalue().rstrip("\n")


def policy_table(predictions: Mapping[str, Prediction], budget_bytes: int | None, kind: str) -> Table:
    """Policies side by side."""
    table = Table(title=f"Policies (budget {format_bytes(budget_bytes)} {kind})" if budget_bytes else "Policies")
    table.add_column("policy")
    for heading in ("step time", "recompute", "peak active", "peak reserved"):
        table.add_column(heading, justify="right")
    table.add_column("of budget" if budget_bytes else "", justify="right")
    table.add_column("on this GPU")
    for name, p in predictions.items():
        peak = p.peak_bytes(kind)
        share = (
            Text(f"{peak / budget_bytes:.1%}", style="red" if peak > budget_bytes else "green") if budget_bytes else ""
        )
        table.add_row(
            Text(POLICY_NAMES.get(name, name), style="bold" if name == "autosac" else ""),
            format_ms(p.step_ms),
            format_ms(p.recompute_ms),
            format_bytes(p.peak_active_bytes),
            format_bytes(p.peak_reserved_bytes) if p.peak_reserved_bytes is not None else "-",
            share,
            Text("fits", style="green") if p.fits else Text("out of memory", style="red"),
        )
    return table


def plan_summary(plan: Plan, notes: Sequence[str] = ()) -> RenderableType:
    """The decision: the policies, the units' budgets, and whatever is to be noted."""
    made_for = plan.made_for
    head = Text(f"{made_for.model} on {made_for.world_size} x {made_for.gpu}: {plan.doing}")
    parts: list[RenderableType] = [head, policy_table(plan.predictions, made_for.budget_bytes, made_for.budget_kind)]
    if plan.units:
        parts.append(unit_table(plan.units))
    if made_for.overrides:
        parts.append(Text(f"- with this plan, the job needs: {' '.join(made_for.overrides)}"))
    if plan.certainty is not None and not notes:
        c = plan.certainty
        parts.append(
            Text(
                f"- it fits the budget with a probability of {format_probability(c.fits)}; the step takes "
                f"{format_ms(c.step_low_ms)} to {format_ms(c.step_high_ms)} with a probability of {c.confidence:.6g}"
            )
        )
    parts += [Text(f"- {note}") for note in notes]
    return Group(*parts)


def batch_table(result: BatchPlan) -> Table:
    """The local batch sizes that were looked at, the best one marked."""

    def gib(nbytes: float) -> str:
        return f"{nbytes / 2**30:.2f}"

    sizes, kind = result.sizes, result.planned.plan.made_for.budget_kind
    fixed = f", global batch {sizes.global_batch_size}" if sizes.global_batch_size else ""
    table = Table(title=f"Local batch sizes{fixed} (tokens/s per GPU, {kind} memory in GiB)")
    for heading in ("batch", "accum.", "full", "none", "tokens/s", "AutoSAC", "tokens/s", "recompute"):
        table.add_column(heading, justify="right")
    table.add_column("outcome")
    for trial in result.trials:
        planned, plain, size = trial.planned, trial.unplanned, trial.local_batch_size
        best = planned is result.planned
        table.add_row(
            str(size),
            str(sizes.accumulation(size)),
            gib(trial.least_bytes) if trial.least_bytes else "",
            gib(plain.peak_bytes) if plain else "",
            f"{plain.tokens_per_second:,.0f}" if plain else "",
            gib(planned.simulation.peak_bytes(kind)) if planned else "",
            f"{trial.tokens_per_second:,.0f}" if planned else "",
            format_ms(planned.plan.predictions["autosac"].recompute_ms) if planned else "",
            "best" if best else trial.outcome,
            style="bold" if best else "",
        )
    return table


def lever_table(own: Planned | None, pulled: Sequence[Pulled], kind: str) -> RenderableType:
    """What other settings of the job would give under the same budget, the best first. `own`: None where no plan fits it."""
    rate = own.simulation.throughput.tokens_per_second if own else 0.0
    title = f"What else would make this step faster ({rate:,.0f} tokens/s per GPU as planned)"
    table = Table(title=title if own else "What would make this step fit")
    for heading in ("change", "tokens/s", "gain", f"peak {kind}", "how"):
        table.add_column(heading, justify="left" if heading in ("change", "how") else "right")
    for one in pulled:
        name = one.name + " *" * bool(one.numbers)
        if one.planned is None:
            # without the place in the code, and what could be done
            why = one.failure.partition(" (at ")[0].partition(";")[0]
            table.add_row(name, "", "", "", why, style="dim")
            continue
        table.add_row(
            name,
            f"{one.tokens_per_second:,.0f}",
            f"{one.tokens_per_second / rate - 1:+.1%}" if own else "",
            format_bytes(one.planned.simulation.peak_bytes(kind)),
            one.how,
        )
    notes = [Text(f"* {one.name} changes numbers: {one.numbers}") for one in pulled if one.numbers]
    return Group(table, *notes)


def budgets_table(found: Sequence[Planned]) -> Table:
    """One row per budget, and the usual policies below."""
    kind = found[0].plan.made_for.budget_kind
    table = Table(title=f"{found[0].plan.made_for.model}: plans by budget ({kind})", caption=_own_peaks(found))
    for heading in ("budget", "step time", "recompute", "peak active", "peak reserved", "of budget", "modules"):
        table.add_column(heading, justify="right")
    for planned in found:
        made_for, p = planned.plan.made_for, planned.plan.predictions["autosac"]
        peak = planned.simulation.peak_bytes(kind)
        table.add_row(
            format_bytes(made_for.budget_bytes),
            format_ms(p.step_ms),
            format_ms(p.recompute_ms),
            format_bytes(p.peak_active_bytes),
            format_bytes(p.peak_reserved_bytes) if p.peak_reserved_bytes is not None else "",
            f"{peak / made_for.budget_bytes:.1%}",
            planned.plan.settings.job_checkpointing or str(len(planned.plan.units)),
        )
    table.add_section()
    for name, p in found[0].plan.predictions.items():
        if name != "autosac":
            table.add_row(
                POLICY_NAMES.get(name, name),
                format_ms(p.step_ms),
                format_ms(p.recompute_ms),
                format_bytes(p.peak_active_bytes),
                format_bytes(p.peak_reserved_bytes) if p.peak_reserved_bytes is not None else "",
                "",
                "",
            )
    return table


def _own_peaks(found: Sequence[Planned]) -> str | None:
    """Which budgets are the peaks of the usual policies."""
    made_for, predictions = found[0].plan.made_for, found[0].plan.predictions
    policies = {
        p.peak_reserved_bytes if made_for.budget_kind == "reserved" else p.peak_active_bytes: POLICY_NAMES.get(
            name, name
        )
        for name, p in predictions.items()
        if name != "autosac"
    }
    budgets = [planned.plan.made_for.budget_bytes for planned in found]
    own = [f"{format_bytes(budget)} is the peak of {policies[budget]}" for budget in budgets if budget in policies]
    return "; ".join(own) or None


def difference_tables(difference: PlanDifference, a: str, b: str) -> RenderableType:
    """What `autosac diff` shows."""
    if not (difference.made_for or difference.predictions or difference.units):
        return Text("the plans are the same")
    parts: list[RenderableType] = [Text(f"A: {a}", overflow="fold"), Text(f"B: {b}", overflow="fold")]
    if difference.made_for:
        table = Table("setting", "A", "B", title="Made for")
        for row in difference.settings():
            table.add_row(*row)
        parts.append(table)
    if difference.predictions:
        table = Table("prediction", title="Predictions")
        for heading in ("A", "B", "change"):
            table.add_column(heading, justify="right")
        for figures in difference.figures():
            table.add_row(*figures)
        parts.append(table)
    if difference.units:
        table = Table("modules", "A", "B", "only A keeps", "only B keeps", title="Modules")
        for group in difference.groups():
            table.add_row(*group)
        parts.append(table)
    else:
        parts.append(Text("all modules have the same decisions"))
    return Group(*parts)


def unit_table(units: Sequence[Unit]) -> Table:
    """Checkpointed modules, consecutive ones with the same decisions in one row."""
    table = Table(title="Checkpointed modules")
    table.add_column("modules")
    offloads = any(unit.offloaded_bytes for unit in units)
    headings = ("number", "discarded", "kept each", *["on the host"] * offloads, "recompute each", "ops kept")
    for heading in headings:
        table.add_column(heading, justify="right")
    for members in alike(units, lambda unit: unit.fqn, lambda unit: (unit.memory_budget, unit.decisions)):
        first = members[0]
        shown = listed(first)
        kept = sum(decision.keep for decision in shown)
        table.add_row(
            span([unit.fqn for unit in members]),
            str(len(members)),
            f"{first.discard_fraction:.1%}",
            format_bytes(first.kept_bytes),
            *[format_bytes(first.offloaded_bytes)] * offloads,
            format_ms(first.recompute_ms),
            f"{kept} of {len(shown)}" if first.memory_budget is None else f"memory budget {first.memory_budget:g}",
        )
    return table


def reasons_table(plan: Plan) -> Table:
    """What was minimised, what one GiB more would save, and the points of the step that held the decision back."""
    table = Table(title="Why: what memory is worth, and where it is short")
    for heading in ("minimised", "decided by", "1 GiB more saves", "limited at"):
        table.add_column(heading, justify="right" if heading.startswith("1") else "left")
    for reasons in plan.reasons:
        points = [f"{where} ({format_ms(price)} per GiB)" for where, price in reasons.binding]
        table.add_row(
            "what the step pays" if reasons.objective == "step" else "recomputation",
            reasons.method,
            f"{format_ms(reasons.ms_per_gib)}\nMSPS of {1e3 / reasons.ms_per_gib:,.0f} GiB/s"
            if reasons.ms_per_gib
            else "-",
            "\n".join(points) or "nothing",
        )
    return table


def decision_table(unit: Unit, plan: Plan | None = None) -> Table:
    """One module, operator by operator, in the order in which they run (AUTO-SAC Figure 5.3), with why each is decided so.

    Its caption says what is not listed.
    """
    price = price_of(plan) if plan else None
    objective = plan.reasons[0].objective if plan and plan.reasons else "recompute"
    how = "" if any(decision.keep for decision in unit.decisions) else ", plain checkpointing"
    if unit.memory_budget is not None:
        how = f", left to the compiler with a memory budget of {unit.memory_budget:g}"
    discarded = f"{unit.discard_fraction:.1%} discarded, {format_ms(unit.recompute_ms)} recomputed"
    table = Table(title=f"{unit.fqn}: {discarded}{how}")
    table.add_column("operator")
    for heading in ("output", "memory", "runtime", "MSPS (GiB/s)"):
        table.add_column(heading, justify="right")
    table.add_column("decision")
    table.add_column("why")
    for decision in listed(unit):
        table.add_row(
            f"{decision.op.removeprefix('aten.').removesuffix('.default')} #{decision.occurrence}",
            " ".join("x".join(map(str, shape)) or "scalar" for shape, _ in decision.outputs[:1]),
            format_bytes(decision.memory_bytes),
            f"{decision.runtime_ms:.3f} ms",
            _msps(decision),
            _decided(decision),
            why(decision, unit, price, objective),
        )
    hidden = len(unit.decisions) - table.row_count
    views = f"{hidden} operators that only make views" if hidden > 1 else "1 operator that only makes views"
    table.caption = f"not listed: {views if hidden else 'views'}; they take no memory and no time"
    return table


def listed(unit: Unit) -> list[Decision]:
    """The operators that take memory or time. The others make views."""
    return [decision for decision in unit.decisions if decision.memory_bytes or decision.runtime_ms]


def _decided(decision: Decision) -> Text:
    if decision.offload:
        return Text("offload", style="cyan")
    return Text("keep", style="green") if decision.keep else Text("recompute", style="yellow")


def _msps(decision: Decision) -> str:
    if decision.msps is None or not math.isfinite(decision.msps):
        return "-"
    return f"{decision.msps / 2**30:,.1f}"


def _recomputation(simulation: Simulation) -> str:
    breakdown, info = simulation.breakdown, simulation.trace.info
    checkpointing = info.own_checkpointing if info.checkpointing == "job" else info.checkpointing
    if info.compiled and checkpointing != "none" and not breakdown.recompute_ms:
        return "a part of the compiled backward"
    return f"{format_ms(breakdown.recompute_ms)} ({format_ms(breakdown.hidden_recompute_ms)} hidden)"


def simulation_summary(simulation: Simulation, name: str) -> RenderableType:
    """Step time and where it goes, peak memory and the verdict."""
    breakdown = simulation.breakdown
    report = simulation.memory.peak()
    verdict = simulation.allocation.verdict
    facts = fact_grid()
    facts.add_row("step time", format_ms(simulation.step_ms))
    if simulation.trace.info.tokens_per_step:
        rate = simulation.throughput
        facts.add_row("throughput", f"{rate.tokens_per_second:,.0f} tokens/s per GPU, {rate.mfu:.1%} MFU")
    for label, value in (
        ("  computation", breakdown.compute_ms),
        ("  exposed communication", breakdown.exposed_communication_ms),
        ("  exposed copies", breakdown.exposed_copy_ms),
        ("  waiting for peers", breakdown.bubble_ms),
        ("  waiting for the host", breakdown.host_bound_ms),
    ):
        facts.add_row(label, format_ms(value))
    facts.add_row("recomputation", _recomputation(simulation))
    facts.add_row("optimizer", format_ms(breakdown.optimizer_ms))
    if breakdown.communication_ms:
        moving = f"{format_ms(breakdown.communication_ms)} (slows computation beside it by "
        facts.add_row("communication", f"{moving}{format_ms(breakdown.interference_ms)})")
    facts.add_row("priced by", served_line(simulation.pricing))
    facts.add_row("peak active", f"{format_bytes(simulation.peak_active_bytes)} {_place_of_peak(report)}")
    facts.add_row("peak reserved", format_bytes(simulation.peak_reserved_bytes))
    outside = simulation.target.hardware.context_bytes + simulation.nccl_bytes
    facts.add_row("outside of PyTorch", f"{format_bytes(outside)} (CUDA context, NCCL)")
    facts.add_row("verdict", Text(str(verdict), style="red" if verdict.outcome.value == "out of memory" else "green"))
    parts: list[RenderableType] = [Panel(facts, title=Text(name), expand=False)]
    unknown = simulation.pricing.unknown
    if unknown:
        listed = ", ".join(list(unknown)[:5])
        those = (
            "an operator without a cost model is"
            if len(unknown) == 1
            else f"{len(unknown)} operators without a cost model are"
        )
        parts.append(Text(f"{those} priced by bytes: {listed}"))
    parts += [Text(f"- {note}") for note in simulation.trace.info.notes]
    if simulation.timeline.buffered:
        parts.append(Text(f"- {_BUFFERED}"))
    return Group(*parts)


def _place_of_peak(report: PeakReport) -> str:
    """Where the peak is; a step that launches a CUDA graph allocates nothing."""
    return f"at {report.op} in {report.module or 'the step'}" if report.op else "from the beginning of the step on"


def ranks_table(ranks: Sequence[Simulation]) -> Table:
    """Distinct ranks of one job, executed together."""
    table = Table(title="Ranks")
    table.add_column("rank", justify="right")
    for heading in ("computation", "waiting for peers", "peak active", "peak reserved"):
        table.add_column(heading, justify="right")
    for rank in ranks:
        table.add_row(
            str(rank.trace.info.rank),
            format_ms(rank.breakdown.compute_ms),
            format_ms(rank.breakdown.bubble_ms),
            format_bytes(rank.peak_active_bytes),
            format_bytes(rank.peak_reserved_bytes),
        )
    return table


def memory_tables(simulation: Simulation) -> RenderableType:
    """The peak by category and by module subtree, and the largest tensors."""
    report = simulation.memory.peak(largest=10)
    categories = Table(title=f"Peak of {format_bytes(report.nbytes)} by category")
    categories.add_column("category")
    categories.add_column("bytes", justify="right")
    categories.add_column("share", justify="right")
    for category, nbytes in sorted(report.by_category.items(), key=lambda item: -item[1]):
        categories.add_row(_category_name(category), format_bytes(nbytes), f"{nbytes / report.nbytes:.1%}")
    modules = Table(title="by module (including submodules)")
    modules.add_column("module")
    modules.add_column("bytes each", justify="right")
    modules.add_column("number", justify="right")
    shares = sorted(report.by_module, key=lambda share: (without_numbers(share.module), natural(share.module)))
    alike_ones = alike(shares, lambda share: share.module, lambda share: format_bytes(share.subtree_bytes))
    alike_ones.sort(key=lambda members: -len(members) * members[0].subtree_bytes)
    for members in alike_ones[:12]:
        name = span([share.module for share in members])
        modules.add_row(name or "(whole step)", format_bytes(members[0].subtree_bytes), str(len(members)))
    tensors = Table(title="Ten largest allocations at the peak")
    for heading in ("bytes", "category", "operator", "module", "source"):
        tensors.add_column(heading, justify="right" if heading == "bytes" else "left")
    for live in report.largest:
        tensors.add_row(
            format_bytes(live.nbytes),
            _category_name(live.category),
            live.op.removeprefix("aten.").removesuffix(".default"),
            live.module,
            live.source,
        )
    return Group(categories, modules, tensors)


def mode_table(simulation: Simulation, others: Mapping[str, Simulation | CaptureError]) -> Table:
    """What each way of checkpointing would change: peaks, activations at the peak, step time; or why it cannot be."""
    table = Table(title="What checkpointing would change")
    table.add_column("checkpointing")
    for heading in ("peak active", "change", "activations at the peak", "peak reserved", "step time", "change"):
        table.add_column(heading, justify="right")
    for name, other in (("this job", simulation), *others.items()):
        if isinstance(other, CaptureError):
            table.add_row(POLICY_NAMES.get(name, name), "fails")
            table.caption = f"the job itself fails under {name}: {other}"
            continue
        activations = other.memory.breakdown_at(other.memory.peak_event).get(Category.ACTIVATION, 0)
        table.add_row(
            POLICY_NAMES.get(name, name),
            format_bytes(other.peak_active_bytes),
            f"{(other.peak_active_bytes - simulation.peak_active_bytes) / 2**30:+.2f} GiB",
            format_bytes(activations),
            format_bytes(other.peak_reserved_bytes),
            format_ms(other.step_ms),
            f"{other.step_ms / simulation.step_ms - 1:+.1%}",
        )
    return table


def draws_table(statistics: Sequence[Statistic], load: str, draws: Sequence[Simulation]) -> Table:
    """Figures over the draws of the expert load imbalance."""
    failed = sum(draw.allocation.verdict.outcome.value == "out of memory" for draw in draws)
    title = f"Expert load imbalance {load}: {len(draws)} draws, {failed or 'none'} out of memory"
    table = Table(title=title)
    table.add_column("figure")
    for heading in ("median", "95th percentile", "least", "most"):
        table.add_column(heading, justify="right")
    for statistic in statistics:
        name, _, unit = statistic.name.rpartition("_")
        show = {"bytes": format_bytes, "ms": format_ms}.get(unit, "{:,.0f}".format)
        label = name if unit in ("bytes", "ms") else statistic.name
        values = (statistic.median, statistic.p95, statistic.least, statistic.most)
        table.add_row(label.replace("_", " "), *(show(value) for value in values))
    return table


def _category_name(category: Category) -> str:
    return category.name.lower().replace("_", " ")
