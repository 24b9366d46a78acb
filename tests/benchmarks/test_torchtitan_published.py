"""Published TorchTitan runs: reading, expressing them as jobs, the defaults of their time, tables."""

from __future__ import annotations

import csv
import dataclasses
from functools import partial
from pathlib import Path

import pytest
import torch
from torch.utils import checkpoint

from autosac.capture.process.server import CaptureServer
from autosac.capture.request import TitanRequest
from autosac.errors import UsageError
from autosac.target import TargetGPU
from autosac.trace import Alloc, Phase, Trace
from benchmarks.torchtitan_published import __main__ as program
from benchmarks.torchtitan_published import tables
from benchmarks.torchtitan_published.eras import ERAS, FEBRUARY_2025, MARCH_2024, NOW, SUMMER_2024, Era, era_of
from benchmarks.torchtitan_published.runs import PUBLISHED, TORCHSIM_MEMORY, Run, UnreproducibleError, read_runs
from benchmarks.torchtitan_published.simulated import Result, captured, simulate_run

ROW = {
    "case_id": "X1",
    "model": "Llama3-8B",
    "hardware": "8xH100 95GiB devgpu",
    "n_gpus": "8",
    "gpu_mem_gib": "94.99",
    "dp_replicate": "1",
    "fsdp_shard": "8",
    "tp": "1",
    "pp": "1",
    "cp": "1",
    "ep": "1",
    "schedule": "",
    "local_batch": "1",
    "global_batch": "8",
    "seq_len": "8192",
    "ac_mode": "selective-op",
    "compile": "no",
    "low_precision": "bf16",
    "tokens_per_s_per_gpu": "6000",
    "step_time_s": "1.365",
    "mem_gib": "50",
    "mem_kind": "peak_reserved",
    "date": "2025-03",
    "source": "",
    "notes": "",
}
VOCABULARY, WIDTH, LAYERS, TOKENS = 2048, 256, 6, 2 * 64  # llama3's debug model, and the batch of `capture`


def write(folder: Path, *changes: dict[str, str]) -> Path:
    with (folder / PUBLISHED).open("w", newline="") as file:
        writer = csv.DictWriter(file, ROW)
        writer.writeheader()
        writer.writerows({**ROW, **change} for change in changes)
    return folder


def run(folder: Path, **change: str) -> Run:
    return read_runs(write(folder, change))[0]


def test_parameters_in_bf16_are_asked_for_where_the_runs_show_them(tmp_path: Path) -> None:
    """The tutorial whose runs keep optimizer states in bf16 is simulated so, and another page is not."""
    page = "pytorch/ao docs/source/eager_tutorials/pretraining.rst"
    asked = run(tmp_path, source=page, date="2025-06").overrides()
    assert asked[asked.index("--training.dtype") + 1] == "bfloat16"
    assert "--training.dtype" not in run(tmp_path, source="pytorch/ao docs/source/workflows/training.md").overrides()


def test_what_a_job_s_description_says(tmp_path: Path) -> None:
    """A chunked loss, gradients in bf16, or nothing: TorchTitan has no arguments for them."""
    for notes, words in (("chunked cross-entropy: less", "chunked loss"), ("gradients reduced in bf16",) * 2):
        asked = run(tmp_path, notes=notes).overrides()
        assert asked[asked.index("--job.description") + 1] == words
    assert "--job.description" not in run(tmp_path).overrides()


def test_nodes_by_what_a_row_says(tmp_path: Path) -> None:
    """Those of a source or of a rate have a file, others are the GPU's usual ones."""
    assert run(tmp_path).cluster is None
    for change in (
        {"source": "KempnerInstitute/KempnerForge"},
        {"notes": "400 Gb/s a node"},
        {"notes": "800 Gb/s a node"},
    ):
        file = run(tmp_path, **change).cluster
        assert file is not None
        assert Path(file).is_file()


def test_norms_of_may_2024_are_fused_unless_a_row_says_otherwise(tmp_path: Path) -> None:
    """TorchTitan let its users choose then."""
    assert run(tmp_path, date="2024-05").era.norm == "native"
    assert run(tmp_path, date="2024-05", notes="non-fused RMSNorm").era.norm == "own"


def test_a_recomputation_may_run_what_the_forward_did_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """As before torch 2.13: what was kept is looked up, all else is computed, and the gradient is right."""
    specs = pytest.importorskip("benchmarks.torchtitan_published.specs")
    mode = checkpoint._CachedTorchDispatchMode
    monkeypatch.setattr(mode, "__torch_dispatch__", mode.__torch_dispatch__)  # to be put back
    specs.recompute_what_was_not_kept()
    ran: list[str] = []

    def body(x: torch.Tensor) -> torch.Tensor:
        ran.append("again" if ran else "forward")
        kept = x.sin()
        if ran[-1] == "again":
            torch.ones(2).cosh()
        return (2 * kept).exp()

    contexts = partial(checkpoint.create_selective_checkpoint_contexts, [torch.ops.aten.sin.default])
    x = torch.tensor([1.0, 2.0], requires_grad=True)
    checkpoint.checkpoint(body, x, use_reentrant=False, context_fn=contexts).sum().backward()
    assert ran == ["forward", "again"]
    torch.testing.assert_close(x.grad, (2 * x.cos() * (2 * x.sin()).exp()).detach())


def test_recipes_of_float8_by_rows(tmp_path: Path) -> None:
    """Gradients of weights in bf16 are a recipe of their own."""
    pytest.importorskip("torchao")
    for precision, recipe in (("fp8 rowwise", "rowwise"), ("fp8 rowwise_with_gw_hp", "rowwise_with_gw_hp")):
        assert run(tmp_path, low_precision=precision).overrides()[-1] == recipe


def test_gpus_of_amd_ran_without_expandable_segments(tmp_path: Path) -> None:
    """What the launcher sets had no effect in ROCm's builds of that time."""
    assert run(tmp_path, hardware="MI300X", gpu_mem_gib="192").allocator == ""
    assert run(tmp_path).allocator == "expandable_segments:True"


def test_only_the_launcher_asks_for_expandable_segments(tmp_path: Path) -> None:
    """Since October 2024 it does; runs that were started without it have PyTorch's default."""
    page = "pytorch/torchtitan benchmarks/llama3-8b_h200_202506_trainy-whitefiber.md"
    assert run(tmp_path).allocator == "expandable_segments:True"
    assert run(tmp_path, date="2024-06").allocator == run(tmp_path, source=page).allocator == ""


def test_a_row_becomes_a_job(tmp_path: Path) -> None:
    """GPU by its memory, layer checkpointing by its frequency, compile and resharding as TorchTitan's arguments."""
    one = run(tmp_path, ac_mode="selective-layer(2)", compile="yes", notes="reshard_after_forward=never")
    assert (one.gpu, one.checkpointing, one.memory_gib, one.oom) == ("h100-sxm-96gb-meta", "selective-2", 50.0, False)
    arguments = one.overrides()
    assert arguments[arguments.index("--parallelism.fsdp_reshard_after_forward") + 1] == "never"
    assert arguments[arguments.index("--parallelism.data_parallel_shard_degree") + 1] == "8"
    assert arguments[arguments.index("--model.flavor") + 1] == "8B"
    assert "--compile.enable" in arguments


@pytest.mark.parametrize(
    ("date", "components"),
    [("2024-11", "model,loss"), ("2024-12", "model"), ("2025-02", "model"), ("2025-06", "model,loss")],
)
def test_compiled_parts_are_those_of_the_date(tmp_path: Path, date: str, components: str) -> None:
    """The loss is compiled where TorchTitan did so then; the list is one argument, as TorchTitan reads lists."""
    arguments = run(tmp_path, compile="yes", date=date).overrides()
    assert arguments[arguments.index("--compile.components") + 1] == components
    following = arguments[arguments.index("--compile.components") + 2 :]
    assert not following or following[0].startswith("--")


def argument(arguments: tuple[str, ...], name: str) -> str:
    return arguments[arguments.index(name) + 1]


def test_float8_and_async_as_the_row_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The output layer stays in bf16; all-gathers in eight bits and asynchronous tensor parallelism where they are named."""
    monkeypatch.setattr("importlib.util.find_spec", lambda _: object())
    plain = run(tmp_path, low_precision="float8 tensorwise").overrides()
    assert argument(plain, "--quantize.linear.float8.filter_fqns") == "output"
    assert not any("all_gather" in text or "async" in text for text in plain)
    gathered = run(tmp_path, low_precision="float8 tensorwise + fp8 all-gather").overrides()
    assert "--quantize.linear.float8.enable_fsdp_float8_all_gather" in gathered
    for precision in ("bf16 + AsyncTP", "float8 tensorwise + AsyncTP"):
        overlapped = run(tmp_path, low_precision=precision).overrides()
        assert "--parallelism.enable_async_tensor_parallel" in overlapped
        assert ("--model.converters" in overlapped) == ("float8" in precision)


def test_a_page_gathers_in_float8_and_launched_one_table(tmp_path: Path) -> None:
    """On the page of December 2024 float8 includes FSDP's all-gathers; its second table has expandable segments."""
    page = {"source": "benchmarks/llama3_h100_202412_torchtitan.md", "date": "2024-12"}
    one = run(tmp_path, low_precision="float8 tensorwise + AsyncTP", notes="Table 4", **page)
    assert one.precision == "float8 tensorwise + fp8 all-gather + AsyncTP" and not one.launched
    assert run(tmp_path, notes="Table 2 (CP)", **page).launched
    assert run(tmp_path, **page).precision == "bf16"
    assert run(tmp_path, low_precision="float8 tensorwise").precision == "float8 tensorwise"


def test_a_commits_runs_on_several_nodes_were_launched(tmp_path: Path) -> None:
    """Of the commit with Qwen3's figures only those on one node had no expandable segments."""
    page = {"source": "pytorch/torchtitan commit d66b72a6a", "date": "2025-09"}
    assert [run(tmp_path, n_gpus=gpus, **page).launched for gpus in ("8", "16", "64")] == [False, True, True]


def test_pipelines_ran_a_microbatch_for_each_rank(tmp_path: Path) -> None:
    """Until April 2025: 32 sequences on 8 pipeline ranks are microbatches of 4; since then TorchTitan's default serves."""
    row = {"pp": "8", "fsdp_shard": "1", "local_batch": "32", "schedule": "1F1B"}
    old, new = (run(tmp_path, date=date, **row).overrides() for date in ("2024-12", "2025-06"))
    assert argument(old, "--parallelism.pipeline_parallel_microbatch_size") == "4"
    assert "--parallelism.pipeline_parallel_microbatch_size" not in new


@pytest.mark.parametrize(
    ("model", "name"), [("Qwen3-32B", "qwen3_2025_08"), ("DeepSeek-V3-16B", "deepseek_v3_2025_08")]
)
def test_families_have_specs_of_their_own(tmp_path: Path, model: str, name: str) -> None:
    """Qwen3 and DeepSeek-V3 with TorchTitan's flavors, and the defaults of the time."""
    arguments = run(tmp_path, model=model, date="2025-09").overrides()
    assert argument(arguments, "--model.name") == name
    assert argument(arguments, "--model.flavor") == model.rpartition("-")[2]


def test_out_of_memory_is_no_figure(tmp_path: Path) -> None:
    """The outcome is kept, and there is no memory to compare with."""
    one = run(tmp_path, mem_gib="OOM", tokens_per_s_per_gpu="", step_time_s="")
    assert one.oom and one.memory_gib is None and one.tokens_per_second is None


def test_pipeline_stages_have_a_rank_each(tmp_path: Path) -> None:
    """The pipeline is the outermost dimension: 8 GPUs in 4 stages begin at ranks 0, 2, 4, 6."""
    one = run(tmp_path, pp="4", fsdp_shard="2", schedule="1F1B")
    assert list(one.later_ranks()) == [2, 4, 6]
    assert one.request(TargetGPU(), 8).rank == 0


@pytest.mark.parametrize("change", [{"model": "GPT-9-7B"}, {"low_precision": "int3"}])
def test_what_cannot_be_expressed_says_why(tmp_path: Path, change: dict[str, str]) -> None:
    """An unknown model or precision is a reason in one line, not a failure of the program."""
    with pytest.raises(UnreproducibleError, match=next(iter(change.values()))):
        run(tmp_path, **change).overrides()


def test_llama2_needs_an_era(tmp_path: Path) -> None:
    """TorchTitan 0.2.2 has no Llama 2; the eras bring its flavors along."""
    one = run(tmp_path, model="Llama2-13B", date="2024-04")
    assert "llama2_13B" in one.overrides()
    with pytest.raises(UnreproducibleError, match="Llama2"):
        run(tmp_path, model="Llama2-13B", date="2026-02").overrides()


def test_malformed_files(tmp_path: Path) -> None:
    """A missing file and a figure that is none are usage errors that name the file and the row."""
    with pytest.raises(UsageError, match=PUBLISHED):
        read_runs(tmp_path)
    with pytest.raises(UsageError, match="X1"):
        run(tmp_path, n_gpus="eight")


def test_torchsim_rows_are_joined(tmp_path: Path) -> None:
    """One run for each job, allocated memory, and a node's four GPUs for tensor parallelism."""
    write(tmp_path)
    (tmp_path / TORCHSIM_MEMORY).write_text(
        "model,parallelism,n_gpus,local_batch,seq_len,ac_mode,peak_gib_measured,torchsim_gib\n"
        "Llama-3.1-70B,FSDP+TP,128,2,64,selective-op,13,12.9\n"
    )
    (one,) = read_runs(tmp_path)
    assert (one.tensor, one.shard, one.allocated, one.memory_gib) == (4, 32, True, 13.0)


def test_eras_by_date() -> None:
    """Months before, at and after the changes; notes decide in the month that saw both norms."""
    months = (
        "2024-03",
        "2024-04",
        "2024-06",
        "2024-07",
        "2024-11",
        "2025-01",
        "2025-02",
        "2025-05",
        "2025-06",
        "2025-09",
        "2025-11",
        "2026-02",
    )
    assert [era_of(month).name for month in months] == [
        "2024-03",
        "2024-04",
        "2024-06",
        "2024-08",
        "2024-11",
        "2025-01",
        "2025-02",
        "2025-04",
        "2025-06",
        "2025-08",
        "2025-10",
        "0.2.2",
    ]
    assert era_of("2025-03", "torch nn.RMSNorm").norm == "composite"
    assert era_of("2025-03", "old RMSNorm").norm == "own"


def result(case: str, checkpointing: str, tokens: float, simulated: float, gib: float, simulated_gib: float) -> Result:
    one = Run(
        case=case,
        model="Llama3-8B",
        gpu="a100-sxm-80gb",
        gpus=8,
        era=NOW,
        shard=8,
        checkpointing=checkpointing,
        memory_gib=gib,
        tokens_per_second=tokens,
    )
    return Result(
        run=one,
        reserved_gib=simulated_gib,
        allocated_gib=1.0,
        oom=False,
        verdict="fits",
        step_ms=1.0,
        tokens_per_second=simulated,
    )


def test_errors_and_ratios(tmp_path: Path) -> None:
    """Full at 110 of 100, none at 165 of 150: +10 % each, the ratio exact. 44 GiB of 40: +10 %; 48 of 50: -4 %, mean 7 %."""
    full, none = result("A", "full", 100, 110, 40, 44), result("B", "none", 150, 165, 50, 48)
    assert full.throughput_error == pytest.approx(0.1) and none.throughput_error == pytest.approx(0.1)
    assert [(a.run.case, b.run.case) for a, b, _ in tables.ratios([full, none])] == [("A", "B")]
    assert tables.ratios([full, none])[0][2] == pytest.approx(0)
    text = tables.summary([full, none])
    assert "reserved memory: mean error 7.0%, worst 10.0% (2 runs)" in text
    assert "2 of 2 outcomes right" in text
    tables.write_csv(tmp_path / "out.csv", [full, none])
    rows = list(csv.DictReader((tmp_path / "out.csv").open()))
    assert [row["memory_gib_sim"] for row in rows] == ["44", "48"]


def test_unknown_case_is_a_usage_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Exit code 2 and one line that lists what there is."""
    write(tmp_path, {})
    monkeypatch.setattr("sys.argv", ["prog", "--truth", str(tmp_path), "--case", "nonsense"])
    assert program.main() == 2
    assert capsys.readouterr().err.strip() == "error: --case nonsense: the runs are X1"


# ---- the eras' jobs, on the debug model ------------------------------------------------------------------------------


@pytest.fixture
def server(capture_server: CaptureServer) -> CaptureServer:
    return capture_server


def capture(server: CaptureServer, era: Era, *more: str) -> Trace:
    """The debug model on two GPUs, two sequences of 64 tokens, without checkpointing."""
    shape = ("--model.flavor", "debugmodel", "--training.local_batch_size", "2", "--training.seq_len", "64")
    return server.capture(
        TitanRequest(config_file=None, overrides=(*era.overrides(), *shape, *more), world_size=2, checkpointing="none")
    )


def calls(trace: Trace, name: str, phase: Phase) -> int:
    return sum(op.phase is phase and trace.signatures[op.signature].name == name for _, op in trace.operators())


@pytest.mark.parametrize("era", [era for era in ERAS if era is not NOW], ids=lambda era: era.name)
def test_an_era_puts_back_what_changed(server: CaptureServer, era: Era) -> None:
    """Two norms a block and a final one; embedding and output in the root group (one all-gather); logits in fp32.

    With the logits kept in 2024, what the step finds alive includes the last one's: tokens x vocabulary x 4 bytes.
    Attention is cuDNN's since October 2025.
    """
    trace = capture(server, era)
    norms = 2 * LAYERS + 1
    assert calls(trace, "aten.rsqrt.default", Phase.FORWARD) == (0 if era.norm == "native" else norms)
    assert calls(trace, "aten._fused_rms_norm.default", Phase.FORWARD) == (norms if era.norm == "native" else 0)
    attention = "cudnn" if era.cudnn_first == "always" else "flash"
    assert calls(trace, f"aten._scaled_dot_product_{attention}_attention.default", Phase.FORWARD) == LAYERS
    gathers = sum(getattr(event, "kind", "") == "all_gather" and event.phase is Phase.FORWARD for event in trace.events)
    assert gathers == LAYERS + 1 + (not era.root_group)
    logits = TOKENS * VOCABULARY * 4
    resident = [i for i in trace.residents() if trace.storages[i].nbytes == logits]
    assert len([i for i in resident if trace.storages[i].op.startswith("aten._to_copy")]) == era.keeps_logits
    streams = {
        trace.storages[e.storage].stream
        for e in trace.events
        if type(e) is Alloc and trace.storages[e.storage].nbytes == (2 * VOCABULARY + 1) * WIDTH * 4
    }
    assert (streams == {0}) == (era.root_group and not era.reduces_in_stream)


@pytest.mark.parametrize("era", [MARCH_2024, SUMMER_2024], ids=lambda era: era.name)
def test_the_whole_model_was_compiled_once(server: CaptureServer, era: Era) -> None:
    """In March 2024 the final norm is in a graph, and none of its operators is a call of its own; since May it is eager."""
    trace = capture(server, era, "--compile.enable", "--compile.components", "model")
    assert calls(trace, "aten.rsqrt.default", Phase.FORWARD) == (not era.compiles_whole_model)


def test_chunked_loss(server: CaptureServer) -> None:
    """Eight chunks: as many log-softmaxes, each of an eighth of the tokens."""
    trace = capture(server, FEBRUARY_2025, "--job.description", "chunked loss")
    shapes = [
        trace.signatures[op.signature].outputs[0].shape
        for _, op in trace.operators()
        if trace.signatures[op.signature].name == "aten._log_softmax.default"
    ]
    assert shapes == [(TOKENS // 8, VOCABULARY)] * 8


def test_captures_are_cached(server: CaptureServer, tmp_path: Path) -> None:
    """The second time the trace comes from the folder, without a capture; another job has a name of its own."""
    request = TitanRequest(
        config_file=None, overrides=("--model.name", "llama3", "--model.flavor", "debugmodel"), checkpointing="none"
    )
    first = captured(server, request, tmp_path)
    assert len(list(tmp_path.iterdir())) == 1

    class Broken(CaptureServer):
        def capture(self, request: TitanRequest) -> Trace:
            raise AssertionError("not from the cache")

    assert captured(Broken(), request, tmp_path).events == first.events
    with pytest.raises(AssertionError):
        captured(Broken(), TitanRequest(config_file=None, overrides=request.overrides), tmp_path)


def test_pipeline_stages_are_simulated_together(tmp_path: Path) -> None:
    """Two stages of the debug model: memory is that of the worse rank, and tokens count once for both."""
    one = run(
        tmp_path,
        model="Llama3-debugmodel",
        n_gpus="4",
        fsdp_shard="2",
        pp="2",
        schedule="1F1B",
        local_batch="4",
        global_batch="",
        seq_len="64",
        ac_mode="none",
    )
    with CaptureServer() as server:  # of its own: a capture process stands for one kind of GPU
        both = simulate_run(one, server, tmp_path)
    assert len(list(tmp_path.glob("*.trace"))) == 2
    assert not both.oom and both.reserved_gib > 0
    assert both.tokens_per_second == pytest.approx(1e3 * 4 * 64 / both.step_ms / 2)


def test_ranks_wait_for_the_one_with_most_tokens() -> None:
    """Where experts lie on several ranks, unless the run's notes say that all get as many; pipelines are simulated without."""
    one = Run(case="", model="DeepSeek-V3-16B", gpu="h100-sxm-80gb", gpus=8, era=era_of("2025-10"), expert=8)
    assert one.is_uneven
    for change in ({"expert": 1}, {"pipeline": 2}, {"notes": "experts equally loaded"}):
        assert not dataclasses.replace(one, **change).is_uneven


@pytest.mark.parametrize(
    ("month", "scatters"),
    [("2025-08", True), ("2025-11", True), ("2025-12", False), ("2026-03", False), ("2026-04", True)],
)
def test_mixtures_of_their_time(month: str, scatters: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Outputs of experts are the same whether they are scattered and added or put in order and multiplied by their scores."""
    pytest.importorskip("torchtitan")
    from torchtitan.models.moe import MoE, MoEArgs

    from benchmarks.torchtitan_published import specs

    torch.manual_seed(0)  # the CPU counts no integers
    monkeypatch.setattr(torch, "histc", lambda x, bins, **_: torch.bincount(x, minlength=bins).float())
    monkeypatch.setattr(torch.Tensor, "tolist", lambda x: [int(i) for i in x])
    args = MoEArgs(num_experts=4, top_k=2, num_shared_experts=1, score_before_experts=False, use_grouped_mm=False)
    model, x = MoE(args, dim=16, hidden_dim=32), torch.randn(2, 8, 16)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    expected = model(x)
    specs.put_back_experts(dataclasses.replace(era_of(month), pads_experts=True), model)
    assert isinstance(model, specs.ScatteringMoE) is scatters
    torch.testing.assert_close(model(x), expected)


@pytest.mark.parametrize(("month", "reorders"), [("2025-06", False), ("2025-10", True)])
def test_inductor_reorders_loops_since_autumn_2025(month: str, reorders: bool) -> None:
    """A job of the era sets it, whatever this torch does by default."""
    pytest.importorskip("torchtitan")
    from torch._inductor import config

    from benchmarks.torchtitan_published import specs

    era = era_of(month)
    spec = specs._compiled_as_then(era, dataclasses.replace(specs.llama3_spec(), parallelize_fn=lambda *_: None))
    with config.patch({"loop_ordering_after_fusion": not reorders, "triton.mix_order_reduction": not reorders}):
        spec.parallelize_fn()
        assert (config.loop_ordering_after_fusion, config.triton.mix_order_reduction) == (reorders, reorders)
