"""A canary for each patch: what it replaces exists in the installed torch, and the replacement takes effect."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention import (
    SDPBackend,
    activate_flash_attention_impl,
    restore_flash_attention_impl,
    sdpa_kernel,
)
from torch.nn.attention.flex_attention import flex_attention

from autosac.capture.device import autocast, kernels
from autosac.capture.device.device import DEVICE_TYPE
from autosac.capture.patches import installing as installing
from autosac.capture.patches import libraries, process_group, registry
from autosac.capture.patches.registry import PATCHES, Patch, Patched, resolve
from autosac.errors import CaptureError
from autosac.target import TargetGPU
from autosac.trace import Label, Phase

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


def test_torchao_finds_the_simulated_gpu() -> None:
    """While its kernels are imported PyTorch has the GPU that is simulated, and Triton for it; afterwards neither."""
    before = torch.cuda.is_available()
    with libraries.found_gpu(TargetGPU(name="B200", compute_capability=(10, 0))):
        from torch.utils._triton import has_triton

        assert torch.cuda.is_available() and torch.cuda.get_device_capability(0) == (10, 0) and has_triton()
    assert torch.cuda.is_available() == before


def test_muon_finds_the_simulated_gpu() -> None:
    """TorchTitan 0.3's DistMuon compares the name of its parameters' device: with the simulated one's."""

    class DistMuon:
        def _validate_parameter_storage(self) -> bool:
            return str(torch.device("meta").type) == "cuda"

    module: Any = ModuleType("dist_muon")
    module.DistMuon = DistMuon
    libraries.rename_device(module)
    assert DEVICE_TYPE in DistMuon._validate_parameter_storage.__code__.co_consts
    assert "cuda" not in DistMuon._validate_parameter_storage.__code__.co_consts


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


def make_flexible(device: torch.device) -> Any:
    """Compiled flexible attention of one projection, under autocast."""
    projection = nn.Linear(16, 16, bias=False, device=device)
    x = torch.zeros(1, 2, 128, 16, device=device)
    attend = torch.compile(flex_attention)

    def step() -> None:
        with torch.autocast(device.type, torch.bfloat16):
            attend(x, projection(x), x.relu()).float().sum().backward()
        projection.weight.grad = None

    return projection, step


def test_flexible_attention_under_autocast(capture: Capture) -> None:
    """All three operands are cast, as CUDA's rule does it: TorchTitan's jobs on one GPU run under autocast."""
    trace = capture(make_flexible).trace
    (attention,) = (op for _, op in trace.operators() if trace.signatures[op.signature].name == "flex_attention")
    assert [meta.dtype for meta in trace.signatures[attention.signature].inputs[:3]] == ["bfloat16"] * 3


def make_newer_attention(device: torch.device) -> Any:
    """PyTorch's FlashAttention as it is, with FlashAttention-3 in its place, and as it was again."""
    q = torch.zeros(1, 2, 128, 64, device=device, dtype=torch.bfloat16)
    projection = nn.Linear(64, 64, device=device, dtype=torch.bfloat16)

    def step() -> None:
        for implementation in (None, "FA3", None):
            if implementation is None:
                restore_flash_attention_impl(_raise_warn=False)
            else:
                activate_flash_attention_impl(implementation)
            with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
                F.scaled_dot_product_attention(projection(q), q, q).sum().backward()
        projection.zero_grad()

    return projection, step


def test_newer_flash_attention_is_named(capture: Capture) -> None:
    """What a job activates is in the signatures of forward and backward, and nothing is imported for it."""
    trace = capture(make_newer_attention).trace
    signatures = [trace.signatures[op.signature] for _, op in trace.operators()]
    named = [dict(signature.arguments).get("implementation") for signature in signatures if "flash" in signature.name]
    assert named == [None, None, "FA3", "FA3", None, None]


def test_newer_flash_attention_needs_its_gpu(capture: Capture) -> None:
    """FlashAttention-3 is for Hopper: on an A100 the job ends as it would there."""
    with pytest.raises(CaptureError, match=r"FA3 requires compute capability 9\.0"):
        capture(make_newer_attention, gpu=TargetGPU(compute_capability=(8, 0)))


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


def make_cast(device: torch.device) -> Any:
    """Operators of every autocast list, with arguments in half precision, single and double."""
    half = torch.zeros(4, 4, device=device, dtype=torch.bfloat16)
    single, double = torch.zeros(4, 4, device=device), torch.zeros(4, 4, device=device, dtype=torch.float64)

    def step() -> None:
        with torch.autocast(device.type, torch.bfloat16):
            single @ single
            torch.exp(half)
            torch.sum(half, 0)
            torch.sum(double, 0)
            torch.addcmul(half, half, single)
            torch.ops.aten.norm.Scalar(half)
            torch.ops.aten.norm.ScalarOpt_dim(half, 2, [0])

    return step


def test_autocast_rules(capture: Capture) -> None:
    """Each list casts as CUDA's autocast does; doubles are left alone."""
    reading = capture(make_cast)
    found = [
        (name, *(meta.dtype for meta in reading.signature(operator).outputs))
        for (_, _, name), operator in zip(reading.placed(), reading.operators(), strict=True)
    ]
    cast, up = ("_to_copy", "bfloat16"), ("_to_copy", "float32")
    norms = [entry for entry in found[10:] if entry != up]
    assert found[:10] == [
        cast,
        cast,
        ("mm", "bfloat16"),
        up,
        ("exp", "float32"),
        ("sum", "float32"),
        ("sum", "float64"),
        up,
        up,
        ("addcmul", "float32"),
    ]
    assert {dtype for _, dtype in norms} == {"float32"}


def test_unsafe_loss_is_refused(capture: Capture) -> None:
    """binary_cross_entropy raises under autocast, as on CUDA."""

    def make_step(device: torch.device) -> Any:
        x = torch.zeros(4, device=device)

        def step() -> None:
            with torch.autocast(device.type):
                F.binary_cross_entropy(x, x)

        return step

    with pytest.raises(Exception, match="unsafe to autocast"):
        capture(make_step)


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


def test_generators_of_the_device_are_forked(capture: Capture) -> None:
    """Devices say whose generators are meant, without the name of their kind beside them."""

    def make_step(device: torch.device) -> Any:
        def step() -> None:
            with torch.random.fork_rng(devices=[device]):
                torch.rand(4, device=device)

        return step

    assert [o.phase for o in capture(make_step).operators("rand")] == [Phase.OTHER]


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
