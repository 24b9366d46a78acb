"""Sizes that depend on data, told from two captures made by hand."""

from __future__ import annotations

from dataclasses import replace

from autosac.jobs.dynamic_shapes import has_router, routers_layer, with_dynamic_shapes
from autosac.plans import ANY_SIZE
from autosac.trace import Call, Collective, Group, Op, Phase, Region, Signature, TensorMeta, Trace
from traces import trace_of

MODULES = ("", "layers.0", "layers.1.moe", "layers.2.moe", "layers.3")
NONE, HISTOGRAM, GROUPED = "aten.mm.default", "aten.histc.default", "aten._grouped_mm.default"


def job(*names: str, module: int = 2, exchange: str = "all_to_all") -> Trace:
    """Operators of these names in one module, and a collective behind them."""
    meta = TensorMeta((4,), (1,), "float32")
    signatures = tuple(Signature(name, (meta,), (meta,)) for name in names)
    events = [Op(i, 0, module, Phase.FORWARD, 0, (-1,), (-1,)) for i in range(len(names))]
    sent = Collective(exchange, 8, 0, 0, False, -1, -1, -1, 0, module, Phase.FORWARD, 0, (), ())
    return trace_of([*events, sent], signatures=signatures, modules=MODULES, groups=(Group.of("g", range(4)),))


def test_who_has_a_router() -> None:
    """A histogram of tokens is one."""
    assert has_router(job(NONE, HISTOGRAM)) and not has_router(job(NONE, GROUPED))


def test_the_first_layer_whose_exchanges_depend_on_routing() -> None:
    """By the number in the histogram's module; none without tokens that are exchanged, unless experts run one by one."""
    assert routers_layer(job(NONE, HISTOGRAM, GROUPED)) == 1
    assert routers_layer(job(HISTOGRAM, module=3)) == 2
    assert routers_layer(job(HISTOGRAM, module=0)) is None
    later = job(NONE, HISTOGRAM, module=3)
    first, *rest = later.events
    assert isinstance(first, Op)
    assert routers_layer(replace(later, events=(first._replace(module=1), *rest))) == 2
    assert routers_layer(job(NONE, GROUPED)) is None
    assert routers_layer(job(HISTOGRAM, GROUPED, exchange="all_reduce")) is None
    assert routers_layer(job(HISTOGRAM, exchange="all_reduce")) == 1


def captured(*rows: tuple[int, str, int, tuple[int, ...]]) -> Trace:
    """Calls: module, operator, occurrence, shape of the result."""
    regions = []
    for module in sorted({row[0] for row in rows}):
        calls = []
        for own, name, occurrence, shape in rows:
            if own == module:
                meta = TensorMeta(shape, (1,) * len(shape), "float32")
                calls.append(Call(name, occurrence, (meta,), 0, 0, False, False, False, (0,), (), (), (0,)))
        regions.append(Region(module, 0, 0, tuple(calls), (), ()))
    return trace_of([], modules=MODULES, regions=regions)


def shapes(trace: Trace) -> list[tuple[int, ...]]:
    """Of all calls' results, in order."""
    return [meta.shape for region in trace.regions for call in region.calls for meta in call.outputs]


def test_sizes_that_differ_between_loads_are_open() -> None:
    """In all modules of the kind, and only in the dimension that differs; the same operator elsewhere is as it was."""
    trace = captured((2, "mm", 0, (5, 8)), (2, "mm", 1, (3, 3)), (3, "mm", 0, (6, 8)), (4, "mm", 0, (5, 8)))
    other = captured((2, "mm", 0, (7, 8)), (2, "mm", 1, (3, 3)), (3, "mm", 0, (6, 8)), (4, "mm", 0, (5, 8)))
    found = with_dynamic_shapes(trace, other)
    assert shapes(found) == [(ANY_SIZE, 8), (3, 3), (ANY_SIZE, 8), (5, 8)]


def test_sizes_that_differ_within_a_module_are_open() -> None:
    """Two executions of the same call; calls without a place of their own are not compared."""
    trace = captured((2, "mm", 0, (5, 8)), (2, "mm", 0, (6, 8)), (2, "x", -1, (1,)))
    other = captured((2, "mm", 0, (6, 8)), (2, "x", -1, (2,)))
    assert shapes(with_dynamic_shapes(trace, other)) == [(ANY_SIZE, 8), (ANY_SIZE, 8), (1,)]


def test_nothing_is_opened_without_a_difference() -> None:
    """The same trace; neither modules that this one lacks nor results of other ranks count."""
    trace = captured((2, "mm", 0, (5, 8)), (4, "mm", 0, (2,)))
    assert with_dynamic_shapes(trace, captured((2, "mm", 0, (5, 8)))) is trace
    assert with_dynamic_shapes(trace, captured((4, "mm", 0, (2, 1)))) is trace
    shorter = trace_of([], modules=MODULES[:2], regions=())
    assert with_dynamic_shapes(shorter, trace) is shorter
