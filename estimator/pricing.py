"""Prices a trace: what each operator and collective takes on a given GPU and cluster.

Every distinct signature is priced once, all of them in one batch, and every distinct (collective, size,
group) once; the events then only look their price up. Views and operators that touch no device memory take no
device time.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from autosac.estimator.attention import LearnedAttention, received_chunk
from autosac.estimator.block_attention import BlockAttention
from autosac.estimator.calibration.fitted import CalibratedCollectives, CalibratedOperators, load_calibrated
from autosac.estimator.calibration.host_memory import memory_state_ms
from autosac.estimator.calibration.traces.correction import CorrectedOperators, CorrectedTransfers, load_correction
from autosac.estimator.cluster import Cluster, Placement, default_cluster
from autosac.estimator.collectives import AlphaBeta
from autosac.estimator.convolution import Convolutions
from autosac.estimator.generated import GeneratedKernels
from autosac.estimator.hardware import Hardware
from autosac.estimator.kernels import Kernels, Streams
from autosac.estimator.latencies import Latencies
from autosac.estimator.learned import LearnedMatmul
from autosac.estimator.models import CollectiveModel, Estimate, Models, OperatorModel, first_estimates
from autosac.estimator.network.chance import straggling
from autosac.estimator.network.flows import FlowModel
from autosac.estimator.power import Kinds, kinds, sustained_ms
from autosac.estimator.profiled import ProfiledModel
from autosac.estimator.recurrent import Recurrent
from autosac.estimator.rocm import Rocm
from autosac.estimator.roofline import Roofline
from autosac.estimator.stand_ins import StandIns
from autosac.estimator.tiled import TiledMatmul
from autosac.estimator.tiled_attention import TiledAttention
from autosac.runtime_sim import LinkUse
from autosac.trace import Collective, Op, Signature, Trace, TraceInfo

_UNKNOWN = "bytes"
_TransferKey: TypeAlias = tuple[str, int, int, int]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Pricing:
    """Prices of a trace's events.

    `event_ms` is the device duration of every operator and collective, 0 for all other events and for views.
    `event_source` is an index into `source`, the names of the models that served, -1 where nothing was
    priced. `event_rel_std` is the relative standard error (1 sigma) that the model states. `unknown`:
    operators that no model knows, and how many milliseconds of the step they were charged by their bytes.
    `link_use`: what the collective of an event takes of the links, by event, where the model says so.
    """

    event_ms: NDArray[np.float64]
    source: tuple[str, ...]
    event_source: NDArray[np.int16]
    event_rel_std: NDArray[np.float32]
    unknown: dict[str, float] = field(default_factory=dict)
    link_use: dict[int, LinkUse] = field(default_factory=dict)

    def shares(self) -> dict[str, float]:
        """Milliseconds that each model accounts for, largest first."""
        served = self.event_source >= 0
        sums = np.bincount(self.event_source[served], weights=self.event_ms[served], minlength=len(self.source))
        return dict(sorted(zip(self.source, sums.tolist(), strict=True), key=lambda item: -item[1]))


def default_models(hardware: Hardware, *, tf32: bool = False, conv_tf32: bool = True, learned: bool = True) -> Models:
    """The default models of `price`, in this order: measured operators; models fitted by `autosac calibrate`; shipped models
    with corrections from profiler traces; shipped models; the roofline. If a run has corrected the profile, its corrections
    apply to all of them.

    `learned=False` leaves out the shipped models.

    Raises:
        HardwareError: a file that the profile names is missing or damaged.
    """
    tf32, conv_tf32 = tf32 and hardware.multiplies("tf32"), conv_tf32 and hardware.multiplies("tf32")
    operators: list[OperatorModel] = []
    if hardware.measured:
        operators.append(ProfiledModel.load(hardware.measured))
    calibrated = load_calibrated(hardware.calibrated) if hardware.calibrated else None
    if calibrated is not None:
        operators.append(CalibratedOperators(calibrated, tf32=tf32))
    shipped: list[OperatorModel] = [StandIns(hardware)]
    if learned:
        streams = Streams(hardware)
        kernels = Kernels(streams)  # before the models of products, which know no thin ones
        shipped += [kernels, LearnedMatmul(hardware, tf32=tf32), BlockAttention(hardware), TiledAttention(hardware)]
        shipped += [
            LearnedAttention(hardware),
            GeneratedKernels(hardware),
            TiledMatmul(hardware, tf32=tf32),
        ]
        shipped.append(Rocm(hardware))
        shipped += [Latencies(hardware), streams.memory, Convolutions(streams, tf32=conv_tf32)]
        shipped.append(Recurrent(hardware))
    shipped.append(Roofline(hardware, tf32=tf32, conv_tf32=conv_tf32))
    collectives: CollectiveModel = FlowModel(hardware) if learned else AlphaBeta(hardware)
    if hardware.corrected and learned:
        correction = load_correction(hardware.corrected)
        operators.append(CorrectedOperators(correction, shipped, tf32=tf32))
        collectives = CorrectedTransfers(correction, collectives)
    operators += shipped
    if hardware.run_corrected and learned:
        operators.insert(0, CorrectedOperators(load_correction(hardware.run_corrected), operators, tf32=tf32))
    if calibrated is not None and calibrated.collectives:
        collectives = CalibratedCollectives(calibrated, collectives)
    return Models(operators=tuple(operators), collectives=collectives)


def models_for(hardware: Hardware, info: TraceInfo) -> Models:
    """The default models of `price` for such a job: what it allows TF32 for."""
    return default_models(hardware, tf32=info.matmul_allows_tf32, conv_tf32=info.cudnn_allows_tf32)


def price(
    trace: Trace,
    hardware: Hardware,
    cluster: Cluster | None = None,
    *,
    models: Models | None = None,
    collectives: CollectiveModel | None = None,
) -> Pricing:
    """Price every event of a trace: the device time (ms) that it takes alone.

    float32 matrix products run at the plain float32 rate unless the job allows TF32 (``trace.info.matmul_allows_tf32``).
    float32 convolutions use TF32, as cuDNN does in PyTorch, unless the job forbids it (``trace.info.cudnn_allows_tf32``).
    Products are slower where they draw more power than the GPU, or the profile's cap, has for them (`power`). In jobs on
    several GPUs, operators take as long as on the slowest GPU (`network.chance.straggling`). On a calibrated
    CPU, page faults and cache misses of operators have a price, too.

    Args:
        trace: one rank's step.
        hardware: the GPU.
        cluster: the machines; None: the usual cluster of the GPU, as large as the job's world.
        models: models of operators and collectives; None: `default_models`.
        collectives: a model of collectives (`AlphaBeta`, `ChunkModel`, `Corrected`, or your own) instead of that of `models`.

    Returns:
        One price for each event, with the models that predicted them.

    Raises:
        SimulationError: a model does not know a collective.
        HardwareError: a file that the profile names is missing or damaged.
    """
    cluster = cluster or default_cluster(hardware, trace.info.world_size)
    if models is None:
        models = models_for(hardware, trace.info)
    used = sorted({event.signature for event in trace.events if type(event) is Op})
    priced = [i for i in used if not trace.signatures[i].is_view and _on_device(trace.signatures[i])]
    transfers = _transfers(trace, cluster, collectives or models.collectives)
    estimates: dict[int, Estimate] = dict(
        zip(priced, first_estimates(models.operators, [trace.signatures[i] for i in priced]), strict=True)
    )
    if trace.info.parallelism.cp > 1:
        estimates = {i: received_chunk(trace.signatures[i], answer) for i, answer in estimates.items()}
    slowdown = straggling(trace.info.world_size, cluster.gpu_spread)
    if slowdown > 1:
        estimates = {i: answer._replace(ms=answer.ms * slowdown) for i, answer in estimates.items()}
    pricing = _assemble(trace, estimates, transfers)
    short = _short_benchmarks(pricing, hardware)
    pricing = replace(pricing, event_ms=sustained_ms(trace, pricing.event_ms, hardware, short))
    if hardware.device == "cpu" and hardware.calibrated:
        memory = load_calibrated(hardware.calibrated).memory
        if memory is not None:
            return replace(pricing, event_ms=pricing.event_ms + memory_state_ms(trace, memory))
    return pricing


def kinds_of(trace: Trace, pricing: Pricing, hardware: Hardware) -> Kinds:
    """Which of a priced step's events are products, and which of them take longer at a lower clock."""
    return kinds(trace, _short_benchmarks(pricing, hardware))


def _short_benchmarks(pricing: Pricing, hardware: Hardware) -> NDArray[np.bool_]:
    """Which events have prices that come from short benchmarks."""
    # Events without a price have source -1, which stands behind the last.
    return np.array([_is_short(name, hardware) for name in pricing.source] + [False])[pricing.event_source]


def _is_short(source: str, hardware: Hardware) -> bool:
    """Whether prices of this source come from short benchmarks. What traces have corrected is measured at the real clock; what
    a run has corrected is relative to prices at the simulated one.
    """
    return source.removeprefix("" if hardware.corrected else "corrected:").startswith(("learned:", "tiles:"))


def _on_device(signature: Signature) -> bool:
    return any(meta.place == "device" for meta in (*signature.inputs, *signature.outputs))


def _key(event: Collective) -> _TransferKey:
    return (event.kind, event.nbytes, event.group, event.peer)


def _transfers(trace: Trace, cluster: Cluster, model: CollectiveModel) -> dict[_TransferKey, Estimate]:
    """The price of every distinct (kind, size, group, peer)."""
    placements: dict[tuple[int, int], Placement] = {}
    prices: dict[_TransferKey, Estimate] = {}
    rank = trace.info.rank
    for key in {_key(event) for event in trace.events if type(event) is Collective}:
        kind, nbytes, group, peer = key
        if (group, peer) not in placements:
            ranks = (rank, peer) if peer >= 0 else trace.groups[group].ranks()
            placements[group, peer] = cluster.place(ranks)
        prices[key] = model.estimate(kind, nbytes, placements[group, peer])
    return prices


def _assemble(trace: Trace, operators: dict[int, Estimate], transfers: dict[_TransferKey, Estimate]) -> Pricing:
    """Lay the prices out over the events."""
    answers = [
        operators.get(event.signature)
        if type(event) is Op
        else transfers[_key(event)]
        if type(event) is Collective
        else None
        for event in trace.events
    ]
    names = tuple(dict.fromkeys(answer.source for answer in answers if answer is not None))
    position = {name: i for i, name in enumerate(names)}
    unknown: dict[str, float] = {}
    for event, answer in zip(trace.events, answers, strict=True):
        if answer is not None and answer.source == _UNKNOWN:
            assert type(event) is Op
            name = trace.signatures[event.signature].name
            unknown[name] = unknown.get(name, 0.0) + answer.ms
    return Pricing(
        event_ms=np.array([a.ms if a else 0.0 for a in answers], dtype=np.float64),
        source=names,
        event_source=np.array([position[a.source] if a else -1 for a in answers], dtype=np.int16),
        event_rel_std=np.array([a.rel_std if a else 0.0 for a in answers], dtype=np.float32),
        unknown=dict(sorted(unknown.items(), key=lambda item: -item[1])),
        link_use={i: answer.use for i, answer in enumerate(answers) if answer is not None and answer.use is not None},
    )
