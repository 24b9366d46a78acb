"""Compiled graphs: the trace holds what the program that Inductor generates launches, allocates, reads and writes."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from autosac.capture.compiler import inductor, partition
from autosac.capture.device import device as simulated
from autosac.capture.jobs.eager import EagerRequest, capture_eager
from autosac.capture.jobs.notes import notes_of
from autosac.target import TargetGPU
from autosac.trace import Alloc, Phase, Trace

pytest.importorskip("triton")

BATCH, LENGTH, WIDTH, HEADS, VOCABULARY = 2, 96, 128, 4, 1000
TOKENS = BATCH * LENGTH


class Attention(nn.Module):
    """Norm, projections, causal attention, and a residual."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parts = self.qkv(self.norm(x)).view(BATCH, LENGTH, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(*parts, is_causal=True)
        return x + self.out(mixed.transpose(1, 2).reshape(x.shape))


class Gated(nn.Module):
    """SwiGLU, its input recomputed in the backward: nothing of it, its products, or all of it."""

    def __init__(self, kept: str = "all") -> None:
        super().__init__()
        self.kept = kept
        self.gate, self.up = nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)

    def inside(self, x: torch.Tensor) -> torch.Tensor:
        return F.silu(self.gate(x)) * self.up(x)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.kept == "all":
            return self.inside(x)
        options = {"context_fn": partial(create_selective_checkpoint_contexts, _keep_products)}
        return checkpoint(self.inside, x, use_reentrant=False, **(options if self.kept == "products" else {}))


def _keep_products(_: Any, operator: Any, *__: Any, **___: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if operator is torch.ops.aten.mm.default else CheckpointPolicy.PREFER_RECOMPUTE


class Rotary(nn.Module):
    """RoPE with complex numbers, as TorchTitan's Llama has it."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        pairs = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2))
        angles = torch.ones_like(pairs)
        return torch.view_as_real(pairs * angles).flatten(-2).type_as(x)


class Experts(nn.Module):
    """Two of four experts for each token, all of them computed."""

    def __init__(self) -> None:
        super().__init__()
        self.router, self.weight = nn.Linear(WIDTH, 4, bias=False), nn.Parameter(torch.empty(4, WIDTH, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        chosen, index = torch.topk(self.router(x).float().softmax(-1), 2)
        weights = torch.zeros(*x.shape[:-1], 4, dtype=chosen.dtype, device=x.device).scatter(-1, index, chosen)
        made = torch.einsum("btd,edf->btef", x, self.weight)
        return (made * weights.type_as(made)[..., None]).sum(-2)


class Float8(nn.Module):
    """A cast to eight bits with a scale for the whole tensor, and back."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scale = 448.0 / x.abs().max().float().clamp(min=1e-12)
        return (x.float() * scale).clamp(-448, 448).to(torch.float8_e4m3fn).to(x.dtype) / scale.to(x.dtype)


class Embedded(nn.Module):
    """A table with a row for padding, and dropout: PyTorch decomposes both with methods of tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(WIDTH, WIDTH, padding_idx=0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.dropout(x + self.table(x.argmax(-1)), 0.1)


def _loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())


PARTS = (
    Attention,
    nn.LayerNorm,
    Gated,
    partial(Gated, "products"),
    partial(Gated, "nothing"),
    Rotary,
    Experts,
    Float8,
    Embedded,
)


def _make(folder: Path, device: torch.device, *, kinds: tuple[Any, ...] = PARTS) -> Any:
    """A step of these parts, each of them compiled; the programs that Inductor writes go to the folder."""
    from torch._inductor.graph import GraphLowering

    programs: list[str] = []

    def keep(program: str) -> None:
        programs.append(program)
        (folder / f"{len(programs)}.py").write_text(program)

    GraphLowering.save_output_code = staticmethod(keep)  # type: ignore[method-assign]
    torch.set_default_dtype(torch.bfloat16)
    with device:
        parts = [part(WIDTH) if part is nn.LayerNorm else part() for part in kinds]
        model = nn.Sequential(*(torch.compile(part, fullgraph=True) for part in parts), nn.Linear(WIDTH, VOCABULARY))
    loss = torch.compile(_loss, fullgraph=True)

    def step() -> None:
        x = torch.randn(BATCH, LENGTH, WIDTH, device=device)
        labels = torch.randint(0, VOCABULARY, (BATCH, LENGTH), device=device)
        loss(model(x), labels).backward()
        for parameter in model.parameters():
            parameter.grad = None
        (folder / "notes").write_text("\n".join(partition.not_generated))

    return model, step


class Captured(NamedTuple):
    """The trace of `_make`'s step, and what the generated programs launch (name, tensors), call, and allocate."""

    trace: Trace
    launches: Counter[tuple[str, int]]
    called: Counter[str]
    allocations: int
    notes: str


_LAUNCH = re.compile(r"^ +(\w+)\.run\((.*), stream=", re.M)


@pytest.fixture(scope="module")
def captured(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Captured]:
    folder = tmp_path_factory.mktemp("programs")
    trace = capture_eager(partial(_make, folder), EagerRequest())
    programs = [path.read_text() for path in folder.glob("*.py")]
    assert len(programs) > 2 * len(PARTS), [program[:30] for program in programs]
    launches: Counter[tuple[str, int]] = Counter()
    for program in programs:
        for name, arguments in _LAUNCH.findall(program):
            tensors = [part for part in re.sub(r"\([^()]*\)", "", arguments).split(",") if re.search(r"[a-z]", part)]
            launches[name, len(tensors)] += 1
    yield Captured(
        trace=trace,
        launches=launches,
        called=Counter(name for program in programs for name in re.findall(r"extern_kernels\.(\w+)\(", program)),
        allocations=sum(len(re.findall(r"= empty_strided_cuda\(\(", program)) for program in programs),
        notes=(folder / "notes").read_text(),
    )


def test_nothing_had_to_be_interpreted(captured: Captured) -> None:
    """Inductor takes all graphs: those of eight modules and of the loss, forward and backward."""
    assert captured.notes == ""


def test_kernels_are_those_of_the_program(captured: Captured) -> None:
    """Every generated kernel is launched as often as the programs say, with as many tensors, and writes to some of them."""
    recorded: Counter[tuple[str, int]] = Counter()
    for _, op in captured.trace.operators():
        signature = captured.trace.signatures[op.signature]
        if signature.name.startswith("triton."):
            recorded[signature.name.removeprefix("triton."), len(signature.inputs)] += 1
            assert signature.mutates and max(signature.mutates) < len(signature.inputs)
            assert dict(signature.arguments)["nbytes"] > 0
    assert recorded == captured.launches


def test_products_and_buffers_are_those_of_the_program(captured: Captured) -> None:
    """External kernels by name, beside those of the model's last layer, which is not compiled; buffers by their number."""
    names = Counter(captured.trace.signatures[op.signature].name for _, op in captured.trace.operators())
    eager = Counter({"mm": 2, "addmm": 1})
    for name in ("mm", "addmm", "bmm", "baddbmm"):
        assert names[f"aten.{name}.default"] == captured.called[name] + eager[name]
    made = sum(
        type(event) is Alloc and captured.trace.storages[event.storage].op == "aten.empty_strided.default"
        for event in captured.trace.events
    )
    assert made == captured.allocations


def test_the_loss_keeps_no_wide_logits(captured: Captured) -> None:
    """Neither direction makes a tensor of tokens x vocabulary in float32; the gradient in bfloat16 is all there is."""
    sizes = Counter(
        captured.trace.storages[event.storage].nbytes for event in captured.trace.events if type(event) is Alloc
    )
    assert sizes[TOKENS * VOCABULARY * 4] == 0
    assert sizes[TOKENS * VOCABULARY * 2] == 2  # logits and their gradient


def test_float8_casts_are_generated(captured: Captured) -> None:
    """No operator of the cast is left: what is recorded beside kernels, products and views is attention and complex RoPE."""
    left = {
        captured.trace.signatures[op.signature].name.split(".")[1]
        for _, op in captured.trace.operators()
        if op.phase in (Phase.FORWARD, Phase.BACKWARD) and not captured.trace.signatures[op.signature].is_view
    }
    assert not left & {"abs", "max", "amax", "clamp", "reciprocal", "_to_copy", "silu", "native_layer_norm"}


class Flexible(nn.Module):
    """Attention with a mask of blocks over parts of one projection; each head of keys serves two of queries."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 2 * WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: torch.Tensor, mask: Any) -> torch.Tensor:
        parts = self.qkv(self.norm(x)).view(*x.shape[:2], 2 * HEADS, -1).transpose(1, 2)
        query, key, value = parts.split([HEADS, HEADS // 2, HEADS // 2], 1)
        mixed = flex_attention(query * 0.5, key, value, block_mask=mask, enable_gqa=True)
        return x + self.out(mixed.transpose(1, 2).reshape(x.shape))


def _make_flexible(folder: Path, device: torch.device) -> Any:
    block = _make(folder, device, kinds=(Flexible,))[0][0]
    mask = create_block_mask(lambda b, h, q, k: q >= k, None, None, 256, 256, device=str(device))

    def flexible_step() -> None:
        block(torch.randn(BATCH, 256, WIDTH, device=device), mask).square().sum().backward()

    return block, flexible_step


@pytest.fixture(scope="module")
def flexible(tmp_path_factory: pytest.TempPathFactory) -> tuple[Trace, list[str]]:
    """The trace of a block with flexible attention, and the programs of its step: forward and backward."""
    folder = tmp_path_factory.mktemp("flexible")
    trace = capture_eager(partial(_make_flexible, folder), EagerRequest())
    texts = [path.read_text() for path in sorted(folder.glob("*.py"))]
    return trace, [text for text in texts if "triton_tem_fused" in text]


def test_code_around_flexible_attention_is_generated(flexible: tuple[Trace, list[str]]) -> None:
    """Kernels, products and buffers are those of the programs; the template's kernel is recorded as its operator."""
    trace, programs = flexible
    assert trace.info.notes == () and len(programs) == 2
    launched = Counter(name for program in programs for name, _ in _LAUNCH.findall(program))
    templates = {name for name in launched if name.startswith("triton_tem")}
    inside = [op for _, op in trace.operators() if op.phase in (Phase.FORWARD, Phase.BACKWARD)]
    names = Counter(trace.signatures[op.signature].name for op in inside)
    assert {name: names[f"triton.{name}"] for name in launched.keys() - templates} == {
        name: count for name, count in launched.items() if name not in templates
    }
    assert sum(name.startswith("triton.") for name in names.elements()) == sum(launched.values()) - len(templates)
    assert (names["flex_attention"], names["flex_attention_backward"], len(templates)) == (1, 1, 2)
    made = sum(
        type(event) is Alloc and trace.storages[event.storage].op == "aten.empty_strided.default"
        for event in trace.events
    )
    assert made == sum(len(re.findall(r"= empty_strided_cuda\(\(", program)) for program in programs)


def test_flexible_attention_reads_views_of_one_projection(flexible: tuple[Trace, list[str]]) -> None:
    """Keys and values, which the kernel gets as one buffer, have the shapes of attention, and come from the product's result;
    what it writes are results, statistics and gradients.
    """
    trace, _ = flexible
    forward, backward = (
        next(op for _, op in trace.operators() if trace.signatures[op.signature].name == name)
        for name in ("flex_attention", "flex_attention_backward")
    )
    heads, grouped = (BATCH, HEADS, 256, WIDTH // HEADS), (BATCH, HEADS // 2, 256, WIDTH // HEADS)
    projection = next(op for _, op in trace.operators() if trace.signatures[op.signature].name == "aten.mm.default")
    assert forward.inputs[0] != forward.inputs[1] == forward.inputs[2] == projection.outputs[0]
    for op, results in ((forward, [heads, heads[:3], heads[:3]]), (backward, [heads, grouped, grouped])):
        signature = trace.signatures[op.signature]
        assert [meta.shape for meta in signature.inputs[:3]] == [heads, grouped, grouped]
        assert Counter(meta.shape for meta in signature.outputs) == Counter(results)
        assert len(set(op.outputs)) == 3 and not set(op.outputs) & set(op.inputs)


def _make_failing(folder: Path, device: torch.device) -> Any:
    def fail(*_: Any, **__: Any) -> Any:
        raise RuntimeError("needs a\nGPU")

    inductor.compile_graph = fail
    return _make(folder, device, kinds=(Gated,))


def test_a_graph_that_cannot_be_generated_is_interpreted(tmp_path: Path) -> None:
    """The step is captured all the same, with one kernel for what would be fused, and with the reason in one line."""
    trace = capture_eager(partial(_make_failing, tmp_path), EagerRequest())
    assert (tmp_path / "notes").read_text() == "needs a GPU"
    said = "Inductor could not compile some graphs, which are priced with approximate fusion: needs a GPU"
    assert trace.info.notes == (said,)
    names = {signature.name for signature in trace.signatures}
    assert {"triton.triton_red_fused", "triton.triton_poi_fused"} < names


def test_before_ampere_bfloat16_is_not_compiled() -> None:
    """Inductor skips such graphs on a T4: the operators run one by one, as they do there, and a note says so."""
    turing = TargetGPU(name="Tesla T4", compute_capability=(7, 5))
    trace = capture_eager(_make_half, EagerRequest(gpu=turing))
    names = {signature.name for signature in trace.signatures}
    assert "aten.silu.default" in names and not any("triton" in name for name in names)
    assert "code that Inductor skips runs uncompiled: BF16 is not supported" in trace.info.notes


def _make_half(device: torch.device) -> Any:
    model = torch.compile(Gated().to(device, torch.bfloat16))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step() -> None:
        model(torch.randn(TOKENS, WIDTH, device=device, dtype=torch.bfloat16)).sum().backward()
        optimizer.step()

    return model, step


@pytest.mark.parametrize(
    ("settings", "beginnings"),
    [
        ({"model.converters": "['quantize.linear.float8']"}, []),
        ({"parallelism.tensor_parallel_degree": "8"}, []),
        (
            {"parallelism.tensor_parallel_degree": "8", "model.converters": "['quantize.linear.float8']"},
            ["the job runs without float8 all-gathers"],
        ),
        (
            {
                "parallelism.tensor_parallel_degree": "8",
                "parallelism.enable_async_tensor_parallel": "True",
            },
            ["asynchronous tensor parallelism has no effect"],
        ),
    ],
)
def test_what_a_job_does_otherwise_than_it_says(settings: dict[str, str], beginnings: list[str]) -> None:
    """float8 and asynchronous tensor parallelism of TorchTitan 0.2.2, each told where tensors are parallel only."""
    found = notes_of(object(), settings)
    assert len(found) == len(beginnings)
    assert all(note.startswith(beginning) for note, beginning in zip(found, beginnings, strict=True))


def test_products_are_padded_where_tensor_cores_want_it() -> None:
    """What counts is the dimension that lies in a row: of 16-bit products, and of those in TF32."""

    def product(m: int, k: int, n: int, dtype: torch.dtype = torch.bfloat16, *, in_columns: bool = False) -> bool:
        mat1 = torch.empty(k, m, dtype=dtype, device="meta").t() if in_columns else torch.empty(m, k, dtype=dtype)
        return inductor.pads(None, mat1, torch.empty(n, k, dtype=dtype, device="meta").t(), None)

    assert product(4096, 768, 50257) and not product(4096, 768, 50304)
    assert not product(4097, 768, 50304) and product(4097, 768, 50304, in_columns=True)
    assert product(4096, 770, 50304)
    assert not product(4096, 768, 50257, torch.float32)
    matmul: Any = torch.backends.cuda.matmul
    before = matmul.fp32_precision
    try:
        matmul.fp32_precision = "tf32"  # from here on PyTorch refuses to say `allow_tf32`
        assert product(4096, 768, 50257, torch.float32)
        matmul.fp32_precision = "ieee"
        assert not product(4096, 768, 50257, torch.float32)
        matmul.allow_tf32 = True
        assert product(4096, 768, 50257, torch.float32)
    finally:
        matmul.allow_tf32 = False
        matmul.fp32_precision = before


@pytest.mark.parametrize(("capability", "balance"), [((8, 0), 77), ((9, 0), 148), ((10, 0), 141), ((12, 0), 148)])
def test_only_what_computes_long_is_padded(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], balance: int
) -> None:
    """A product of three equal sizes does 3 times as much for a byte as it has rows: from three times the GPU's balance on."""
    monkeypatch.setattr(simulated, "stood_for", TargetGPU(compute_capability=capability))

    def product(size: int) -> bool:
        matrix = torch.empty(size, size, dtype=torch.bfloat16, device="meta")
        return inductor.pads(None, matrix, matrix, None)

    assert [product(3 * balance + more) for more in (0, 1, 2)] == [
        False,
        (3 * balance + 1) % 8 != 0,
        (3 * balance + 2) % 8 != 0,
    ]


def _odd_vocabulary(device: torch.device) -> Any:
    torch.set_default_dtype(torch.bfloat16)
    model = torch.compile(nn.Linear(1024, 5001, bias=False, device=device))
    return model, lambda: model(torch.randn(2048, 1024, device=device)).sum().backward()


def test_a_padded_product_is_in_the_trace() -> None:
    """5,001 columns become 5,008 of the product, in the forward and in the gradient of the weight."""
    trace = capture_eager(_odd_vocabulary, EagerRequest())
    products = [
        max(trace.signatures[op.signature].outputs[0].shape)
        for _, op in trace.operators()
        if trace.signatures[op.signature].name == "aten.mm.default"
    ]
    assert products == [5008, 5008]


def _scattered(device: torch.device) -> tuple[nn.Module, Any]:
    model = nn.Linear(64, 64).to(device)

    @torch.compile
    def mixed(x: torch.Tensor) -> torch.Tensor:
        y = model(x)
        return y.masked_scatter(y > 0, x)

    x = torch.randn(256, 64, device=device)
    return model, lambda: mixed(x).sum().backward()


def test_decompositions_know_what_cudas_code_generation_can_do() -> None:
    """masked_scatter is generated with the kernels around it, as with a GPU: the trace has no operator of that name."""
    trace = capture_eager(_scattered, EagerRequest())
    names = {trace.signatures[op.signature].name for _, op in trace.operators()}
    assert any(name.startswith("triton") for name in names), sorted(names)
    assert "aten.masked_scatter.default" not in names
