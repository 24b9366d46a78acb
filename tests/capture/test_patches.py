"""A canary for each patch: what it replaces exists in the installed torch, and the replacement takes effect."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from autosac.capture.device import autocast, kernels
from autosac.capture.patches import installing as installing
from autosac.capture.patches import process_group, registry
from autosac.capture.patches.registry import PATCHES, Patch, Patched, resolve
from autosac.errors import CaptureError
from autosac.trace import Alloc, Free, HostWait, Label, Phase, WorkWait

Capture = Callable[..., Any]
WORLD = 4
FLOAT = 4  # bytes


TARGETS = sorted({target for each in PATCHES for target in each.targets})


@pytest.mark.parametrize(
    "path",
    [
        *TARGETS,
        "torch._C:_acc.DeviceGuard.type_",
        "torch._dynamo.convert_frame:ConvertFrameAssert.__call__",
        "torch.utils._python_dispatch:_disable_current_modes",
        "torch._higher_order_ops.wrap:inductor_compiled_code",
        "torch:_TorchCompileInductorWrapper.__call__",
        "torch._C:_acc.create_empty_tensor",
        "torch._C:_get_sdp_priority_order",
        "torch._C:_set_only_lift_cpu_tensors",
        "torch.utils.backend_registration:_setup_privateuseone_for_python_backend",
    ],
)
def test_symbols(path: str) -> None:
    """Everything private that capture replaces or calls exists."""
    assert callable(resolve(path))


@pytest.mark.parametrize("each", PATCHES, ids=lambda each: each.name)
def test_every_patch_says_why(each: Patch) -> None:
    """A registered patch has a reason."""
    assert len(each.reason.split()) >= 4


def test_a_torch_without_a_target(monkeypatch: pytest.MonkeyPatch) -> None:
    """One line names what is missing, the patch and the releases that have it; nothing is installed."""
    installed: list[Patched] = []
    monkeypatch.setattr(registry, "PATCHES", [Patch(installed.append, ("torch:no_such_name",))])
    with pytest.raises(CaptureError, match=r"^torch \S+ has no torch.no_such_name, .*: install torch 2.11 to 2.15$"):
        registry.install_all(None, None)  # type: ignore[arg-type]
    assert installed == []


def test_titan_symbol() -> None:
    """TorchTitan's models ask for the GPU's capability by a function of this signature, without free variables."""
    utils = pytest.importorskip("torchtitan.tools.utils")
    code = utils.has_cuda_capability.__code__
    assert code.co_varnames[: code.co_argcount] == ("major", "minor") and code.co_freevars == ()


def test_torchao_symbols() -> None:
    """Torchao's kernels ask its own functions for the GPU's capability and CUDA's version."""
    utils = pytest.importorskip("torchao.utils")
    asked = ("is_sm_at_least_89", "is_sm_at_least_90", "is_sm_at_least_100", "is_cuda_version_at_least")
    assert all(callable(getattr(utils, name)) for name in asked)


def test_triton_symbols() -> None:
    """Triton launches kernels through these two methods."""
    pytest.importorskip("triton")
    assert callable(resolve("triton.runtime.jit:JITFunction.run"))
    assert callable(resolve("triton.runtime.autotuner:Autotuner.run"))


# ---- kernels --------------------------------------------------------------------------------------------------------


def registered(key: str) -> set[str]:
    """Operators of aten with a kernel for a dispatch key."""
    names = torch._C._dispatch_get_registrations_for_dispatch_key(key)
    return {name.removeprefix("aten::") for name in names if name.startswith("aten::")}


def test_autocast_lists_are_complete() -> None:
    """Every operator that this torch autocasts on CUDA is in one list, but for cuDNN's own and named dimensions."""
    lists = (autocast.LOWER_PRECISION, autocast.FLOAT32, autocast.FLOAT32_BY_DTYPE, autocast.WIDEST, autocast.BANNED)
    ours = [name for names in lists for name in names] + list(autocast.WITH_DTYPE)
    assert len(ours) == len(set(ours))
    missing = registered("AutocastCUDA") - set(ours)
    assert {name for name in missing if "cudnn" not in name and "name" not in name.lower()} == set()


def test_natively_run_operators_are_complete() -> None:
    """The composite operators with a CUDA kernel of their own are those that capture runs as one."""
    if torch.version.cuda is None:
        pytest.skip("this torch is built without CUDA")
    assert set(kernels.NATIVE_ON_CUDA) == registered("CUDA") & registered("CompositeImplicitAutograd")


def make_native(device: torch.device) -> Any:
    """An RMSNorm, SiLU and Mish, forward and backward."""
    with device:
        norm, x = nn.RMSNorm(8), torch.zeros(2, 8)

    def step() -> None:
        F.mish(F.silu(norm(x))).sum().backward()
        norm.weight.grad = None

    return norm, step


def test_native_operators(capture: Capture) -> None:
    """RMSNorm, SiLU and Mish are one kernel each in both directions, as CUDA runs them."""
    names = [name for _, _, name in capture(make_native).placed()]
    assert names == [
        "_fused_rms_norm",
        "silu",
        "mish",
        "sum",
        "ones_like",
        "mish_backward",
        "silu_backward",
        "_fused_rms_norm_backward",
    ]


# ---- distributed ----------------------------------------------------------------------------------------------------


def make_ddp(device: torch.device) -> Any:
    """Two layers under DistributedDataParallel."""
    process_group.initialise(WORLD, 0)
    with device:
        model, x = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False)), torch.zeros(2, 8)
    replicated = nn.parallel.DistributedDataParallel(model)

    def step() -> None:
        replicated(x).sum().backward()
        replicated.zero_grad()

    return model, step


def test_ddp(capture: Capture) -> None:
    """DDP reduces both gradients in one bucket beside the backward, waits at its end, then copies them back.

    The kept step is one in which it does not sort its buckets (two broadcasts).
    """
    reading = capture(make_ddp)
    (reduction,) = reading.collectives()
    assert reduction.kind == "all_reduce" and reduction.nbytes == 2 * 64 * FLOAT
    assert reduction.phase is Phase.BACKWARD and reduction.asynchronous
    (wait,) = reading.of(WorkWait)
    assert wait == WorkWait(reduction.work, 0)
    into, out_of = reading.operators("copy_", Phase.BACKWARD)[:2], reading.operators("copy_", Phase.BACKWARD)[2:]
    events = reading.trace.events
    order = [*into, reduction, wait, *out_of]
    assert [events.index(event) for event in order] == sorted(events.index(event) for event in order)
    assert len(out_of) == 2 and not reading.of(HostWait)


def make_fsdp(device: torch.device) -> Any:
    """Two layers, 8 to 10 to 8, under FSDP2, each a unit."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    process_group.initialise(WORLD, 0)
    mesh = init_device_mesh(device.type, (WORLD,))
    with device:
        model, x = nn.Sequential(nn.Linear(8, 10, bias=False), nn.Linear(10, 8, bias=False)), torch.zeros(2, 8)
    for module in (*model, model):
        fully_shard(module, mesh=mesh)

    def step() -> None:
        model(x).sum().backward()
        model.zero_grad()

    return model, step


@pytest.fixture(scope="module")
def fsdp(capture: Capture) -> Any:
    """Of `make_fsdp`."""
    return capture(make_fsdp)


def test_fsdp_shards(fsdp: Any) -> None:
    """Rank 0 holds 3 of 10 and 2 of 8 rows; transfers are padded to equal shards; reductions run on their own stream."""
    padded = [12 * 8 * FLOAT, 8 * 10 * FLOAT]
    assert sorted(fsdp.labelled(Label.PARAMETER)) == [2 * 10 * FLOAT, 3 * 8 * FLOAT]
    assert [(c.kind, c.nbytes, c.phase) for c in fsdp.collectives()] == [
        ("all_gather", padded[0], Phase.FORWARD),
        ("all_gather", padded[1], Phase.FORWARD),
        ("all_gather", padded[1], Phase.BACKWARD),
        ("all_gather", padded[0], Phase.BACKWARD),
        ("reduce_scatter", padded[1], Phase.BACKWARD),
        ("reduce_scatter", padded[0], Phase.BACKWARD),
    ]
    gathers, reductions = fsdp.collectives("all_gather"), fsdp.collectives("reduce_scatter")
    assert len({c.stream for c in gathers}) == len({c.stream for c in reductions}) == 1
    assert len({gathers[0].stream, reductions[0].stream, 0}) == 3
    assert fsdp.trace.groups[gathers[0].group].ranks() == tuple(range(WORLD))


def test_fsdp_unsharded_parameters(fsdp: Any) -> None:
    """Unsharded parameters are allocated and freed by resizing, for the forward and again for the backward."""
    storages = [e.storage for e in fsdp.of(Alloc) if fsdp.trace.storages[e.storage].label is Label.UNSHARDED_PARAMETER]
    sizes = [(fsdp.trace.storages[s].nbytes, fsdp.trace.storages[s].phase) for s in storages]
    first, second = 10 * 8 * FLOAT + 2 * 8 * FLOAT, 8 * 10 * FLOAT  # all shards of three rows
    assert sizes == [(first, Phase.FORWARD), (second, Phase.FORWARD), (second, Phase.BACKWARD), (first, Phase.BACKWARD)]
    freed = {event.storage for event in fsdp.of(Free)}
    assert freed >= set(storages)
    assert fsdp.labelled(Label.UNSHARDED_PARAMETER) == []


def test_fsdp_waits(fsdp: Any) -> None:
    """Every transfer of FSDP is waited for on the stream that it was issued to."""
    assert [(w.work, w.stream) for w in fsdp.of(WorkWait)] == [(c.work, c.stream) for c in fsdp.collectives()]


def make_dtensor(device: torch.device) -> Any:
    """A sharded product, made whole by a functional all-gather."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    process_group.initialise(WORLD, 0)
    mesh = init_device_mesh(device.type, (WORLD,))
    a = distribute_tensor(torch.zeros(8, 8, device=device), mesh, [Shard(0)])
    b = distribute_tensor(torch.zeros(8, 8, device=device), mesh, [Replicate()])

    def step() -> None:
        (a @ b).relu().redistribute(mesh, [Replicate()]).to_local() + 1

    return step


def test_dtensor_makes_no_phantom_operators(capture: Capture) -> None:
    """A DTensor program runs its local operators and nothing else: shape propagation is not recorded."""
    reading = capture(make_dtensor)
    assert [
        (name, reading.signature(o).outputs[0].shape)
        for (_, _, name), o in zip(reading.placed(), reading.operators(), strict=True)
    ] == [("mm", (2, 8)), ("relu", (2, 8)), ("add", (8, 8))]
    assert sum(type(event) is Alloc for event in reading.trace.events) == 4


def test_functional_collectives(capture: Capture) -> None:
    """Waiting for a functional collective allocates nothing: it gives back the collective's own result."""
    reading = capture(make_dtensor)
    (gather,) = reading.collectives()
    (wait,) = reading.of(WorkWait)
    assert gather.kind == "all_gather" and gather.nbytes == 8 * 8 * FLOAT and gather.asynchronous
    assert wait == WorkWait(gather.work, 0)
    (add,) = reading.operators("add")
    assert add.inputs == gather.outputs


def test_collectives_of_the_compute_stream(capture: Capture) -> None:
    """The gather is issued on stream 0, and what it makes is for communication all the same; the other results are not."""
    reading = capture(make_dtensor)
    (gather,) = reading.collectives()
    made = [reading.trace.storages[event.storage] for event in reading.of(Alloc)]
    assert (gather.stream, gather.peer, gather.batch) == (0, -1, -1) and {storage.stream for storage in made} == {0}
    assert [storage.label for storage in made] == [Label.NONE, Label.NONE, Label.COMMUNICATION, Label.NONE]
    assert made[2] == reading.trace.storages[gather.outputs[0]]


def make_point_to_point(device: torch.device) -> Any:
    """Two transfers as one batch, and one alone."""
    process_group.initialise(WORLD, 1)
    sent, received = torch.zeros(6, device=device), torch.zeros(4, device=device)

    def step() -> None:
        batch = [dist.P2POp(dist.isend, sent, 2), dist.P2POp(dist.irecv, received, 0)]
        for work in dist.batch_isend_irecv(batch):
            work.wait()
        dist.isend(sent, 3).wait()

    return step


def test_point_to_point(capture: Capture) -> None:
    """Transfers of a batch share it; peers are global ranks; waits name their work."""
    reading = capture(make_point_to_point)
    send, receive, alone = reading.collectives()
    assert (send.kind, send.peer, send.nbytes) == ("send", 2, 6 * FLOAT)
    assert (receive.kind, receive.peer, receive.nbytes) == ("recv", 0, 4 * FLOAT)
    assert send.batch == receive.batch == send.work == receive.work >= 0
    assert (alone.kind, alone.peer, alone.batch) == ("send", 3, -1) and alone.work != send.work
    waits = [wait.work for wait in reading.of(WorkWait)]
    assert waits[-1] == alone.work and set(waits) == {send.work, alone.work}


# ---- compilation ----------------------------------------------------------------------------------------------------


def make_compiled(device: torch.device) -> Any:
    """A compiled layer and activation."""
    with device:
        model, x = nn.Sequential(nn.Linear(8, 16, bias=False), nn.Tanh()), torch.zeros(2, 8)
    compiled = torch.compile(model)

    def step() -> None:
        compiled(x).sum().backward()
        model.zero_grad()

    return model, step


def test_compiled_regions_are_captured(capture: Capture) -> None:
    """A compiled module's matrix products are those of the eager one, in both directions, without a compiler."""
    reading = capture(make_compiled)
    products = [(o.phase, sorted(reading.signature(o).outputs[0].shape)) for o in reading.operators("mm")]
    assert products == [(Phase.FORWARD, [2, 16]), (Phase.BACKWARD, [8, 16])]


def make_compiled_ddp(device: torch.device) -> Any:
    """The same under DDP, as TorchTitan does it: the layer is compiled whole, the graph split at DDP's buckets."""
    import torch._dynamo.config as dynamo

    dynamo.optimize_ddp = "ddp_optimizer"
    process_group.initialise(WORLD, 0)
    with device:
        model, x = nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 16)), torch.zeros(2, 8)
    model[1] = torch.compile(model[1], fullgraph=True)
    replicated = nn.parallel.DistributedDataParallel(model)

    def step() -> None:
        replicated(x).sum().backward()
        replicated.zero_grad()

    return model, step


def test_compiled_regions_under_ddp(capture: Capture) -> None:
    """A compiled layer whose input needs a gradient is captured, and its gradients are reduced."""
    reading = capture(make_compiled_ddp)
    assert [o.phase for o in reading.operators("addmm")] == [Phase.FORWARD, Phase.FORWARD]
    assert [c.nbytes for c in reading.collectives("all_reduce")] == [(8 * 16 + 16 + 16 * 16 + 16) * FLOAT]


class Marking(nn.Module):
    """Its second call, the recomputation of the first step, makes a mark of the profiler more."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.calls = nn.Linear(8, 8), 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        for _ in range(self.calls):
            with torch.profiler.record_function("mark"):
                pass
        return torch.tanh(self.inner(x))


def make_marked(device: torch.device) -> Any:
    """A step under selective checkpointing; RuntimeError unless marks of the profiler have been let through."""
    from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

    from autosac.capture.patches.steps import stopped_by_torch

    model, x = Marking().to(device), torch.zeros(2, 8, device=device)
    contexts = partial(create_selective_checkpoint_contexts, lambda *_, **__: CheckpointPolicy.PREFER_RECOMPUTE)

    def step() -> None:
        model.calls = 0
        checkpoint(model, x, use_reentrant=False, context_fn=contexts, early_stop=False).sum().backward()
        model.zero_grad()
        expected = torch.__version__ >= "2.13"  # which counts the marks
        if bool(stopped_by_torch) != expected:
            raise RuntimeError(f"{list(stopped_by_torch)}")

    return model, step


def test_marks_in_a_recomputation_do_not_stop_it(capture: Capture) -> None:
    """A mark of the profiler that only the recomputation makes is let through and noted; the product runs twice."""
    reading = capture(make_marked)
    assert [o.phase for o in reading.operators("addmm")] == [Phase.FORWARD, Phase.RECOMPUTE]


# ---- pointers -------------------------------------------------------------------------------------------------------


def test_storages_can_be_told_apart(capture: Capture) -> None:
    """A view has the storage pointer of its base, another tensor has not."""

    def make_step(device: torch.device) -> Any:
        def step() -> None:
            x, other = torch.ones(4, 4, device=device), torch.ones(4, 4, device=device)
            pointer = x.untyped_storage().data_ptr()
            assert pointer == x.t().untyped_storage().data_ptr() != other.untyped_storage().data_ptr()

        return step

    capture(make_step)


# ---- conversions of modules -----------------------------------------------------------------------------------------


def make_converted(device: torch.device) -> Any:
    """A linear layer that is made in float32 on the CPU, moved to the device and then halved."""
    model = nn.Linear(8, 8).to(device).bfloat16()
    x = torch.zeros(2, 8, dtype=torch.bfloat16, device=device)
    return model, lambda: model(x).sum().backward()


@pytest.mark.parametrize("target", ["gpu", "cpu"])
def test_a_module_may_be_moved_and_converted(capture: Capture, target: str) -> None:
    """Its parameters are resident in the new type: 64 + 8 numbers of 2 bytes."""
    reading = capture(make_converted, target=target)
    assert sorted(reading.labelled(Label.PARAMETER)) == [8 * 2, 64 * 2]
