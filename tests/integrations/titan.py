"""TorchTitan's own Llama debug model on the CPU, through the plugin's code path.

Also the program of several gloo ranks.
"""

from __future__ import annotations

import copy
import dataclasses
import importlib.util
import json
import os
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torchtitan.distributed.parallel_dims as parallel_dims_module
import torchtitan.protocols.train_spec as registry
from torch import nn
from torch.nn import functional as F
from torchtitan.config import ConfigManager
from torchtitan.distributed import ParallelDims

from autosac.capture import lifeline
from autosac.capture.patches.imports import import_compiler
from autosac.errors import AutosacError, PlanError
from autosac.integrations.apply import apply, switch
from autosac.integrations.observe import observe
from autosac.integrations.operators.modules import find_module, unwrapped
from autosac.integrations.recompute import offload
from autosac.integrations.recompute.compiled_modes import SEES_RESULTS
from autosac.integrations.torchtitan import transform
from autosac.integrations.torchtitan.planning import agree_on, agree_on_change, gathered
from autosac.plans import Plan

LAYERS = ["layers.0", "layers.1"]
WAIT = "_c10d_functional.wait_tensor"


def configure(*arguments: str) -> Any:
    """A TorchTitan JobConfig that has the [autosac] section."""
    module = "autosac.integrations.torchtitan.job_config"
    job = ["--job.custom_config_module", module, "--model.name", "llama3", "--model.flavor", "debugmodel"]
    return ConfigManager().parse_args([*job, "--training.seq_len", "16", *arguments])


def dims(world_size: int = 1, tp: int = 1) -> ParallelDims:
    """TorchTitan's parallel dimensions on the CPU: the rest of the ranks shard the data."""
    parallel_dims_module.device_type = "cpu"
    shape = ParallelDims(1, world_size // tp, 1, tp, 1, 1, 1, world_size)
    if world_size > 1:
        shape.build_mesh()
    return shape


def parallelized(config: Any, shape: ParallelDims) -> nn.Module:
    """The two-layer debug model, parallelized as TorchTitan's Trainer does it, on the meta device."""
    spec = registry.get_train_spec("llama3")
    arguments = dataclasses.replace(spec.model_args["debugmodel"], n_layers=2, dim=64, n_heads=4, vocab_size=64)
    with torch.device("meta"):
        model = spec.model_cls(arguments)
    return spec.parallelize_fn(model, shape, config)


def build(config: Any, shape: ParallelDims) -> nn.Module:
    """The two-layer debug model, parallelized and initialised."""
    model = parallelized(config, shape)
    model.to_empty(device="cpu")
    torch.manual_seed(3)
    with torch.no_grad():
        model.init_weights()
    for module in model.modules():
        if hasattr(module, "set_force_sum_reduction_for_comms"):
            module.set_force_sum_reduction_for_comms(True)  # gloo has no other
    return model


def step(model: nn.Module) -> tuple[torch.Tensor, ...]:
    """Loss and this rank's part of all gradients."""
    tokens = torch.randint(0, 64, (2, 16), generator=torch.Generator().manual_seed(5))
    logits = model(tokens)
    logits = logits.full_tensor() if hasattr(logits, "full_tensor") else logits
    loss = F.cross_entropy(logits.flatten(0, 1).float(), tokens.roll(-1, 1).flatten())
    loss.backward()
    gradients = [p.grad for p in model.parameters()]
    return (loss.detach(), *(g.to_local() if hasattr(g, "to_local") else g for g in gradients))


def observed(config: Any, shape: ParallelDims, log: Any) -> dict[str, list[Any]]:
    """What TorchTitan's layers run in their second step, observed where the plan will be applied."""

    def see(model: nn.Module) -> None:
        observe(model, LAYERS, log)

    with transform(see):
        model = build(config, shape)
    step(model)
    with torch.autograd.graph.saved_tensors_hooks(log.pack, lambda saved: saved.tensor):
        step(model)
    return log.calls


def bare(shape: ParallelDims) -> nn.Module:
    """The model whose names and shapes a plan holds."""
    with transform(None):
        return build(configure("--activation_checkpoint.mode", "none"), shape)


def compare(lab: Any, shape: ParallelDims, folder: Path, rank: int, *, offloads: bool = False) -> dict[str, Any]:
    """Every 2nd group of TorchTitan's layers kept, on the host if so wished, by a plan file in the job's configuration,
    against no checkpointing.
    """
    reference_model = bare(shape)
    reference = step(reference_model)
    calls = observed(configure(), shape, lab.Log())
    groups = lab.groups_of(calls["layers.0"])
    keep = {i for group in groups[::2] for i in group}
    decisions = {fqn: lab.decisions_from(calls[fqn], keep) for fqn in LAYERS}
    rows = {
        fqn: tuple(dataclasses.replace(d, offload=offloads and d.keep) for d in ds) for fqn, ds in decisions.items()
    }
    path = folder / f"plan-{rank}-{shape.tp}{'-host' * offloads}.json"
    lab.plan_for(reference_model, rows, world_size=shape.world_size, early_stop=False).save(path)
    model = build(configure("--autosac.enable", "--autosac.plan", str(path)), shape)
    with warnings.catch_warnings(record=True) as caught, lab.counting(model, LAYERS) as ran, parcels() as kinds:
        warnings.simplefilter("always")
        result = step(model)
    planned = [calls["layers.1"][i].op for i in lab.must_run(calls["layers.1"], keep)]
    return {
        "same": lab.same(result, reference),
        "gradients": len(result) - 1,
        "kept": len(keep),
        "offloaded": kinds,
        # What is saved of DTensors is not followed by the storages inside of them: there only that nothing kept runs again. A
        # wait has no result of its own to keep.
        "recomputed_as_planned": (
            ran.again["layers.1"] == planned
            if shape.tp == 1
            else _is_part(
                [op for op in ran.again["layers.1"] if not op.startswith(WAIT)],
                [c.op for i, c in enumerate(calls["layers.1"]) if i not in keep and not c.op.startswith(WAIT)],
            )
        ),
        "fallbacks": [str(w.message) for w in caught if w.category.__name__ == "PlanMismatchWarning"],
        "classes": [type(module).__name__ for module in wrappers(model)],
    }


def switched(lab: Any, shape: ParallelDims, rank: int) -> dict[str, Any]:
    """Under FSDP: from a plan of the first layer to one that rank 0 hands out, of the second; then none is handed out."""
    reference_model = bare(shape)
    calls = observed(configure(), shape, lab.Log())
    of_layer = [lab.plan_for(reference_model, {fqn: lab.decisions_from(calls[fqn], set())}) for fqn in LAYERS]
    with transform(lambda model: apply(model, of_layer[0])):
        model = build(configure(), shape)
    ran = []
    for change in (None, of_layer[1], None):
        store = dist.distributed_c10d._get_default_store()
        agreed = agree_on_change(lambda change=change: change if rank == 0 else None, rank, store)
        if agreed is not None:
            switch(model, agreed)
        model.zero_grad()
        with lab.counting(model, LAYERS) as counted:
            result = step(model)
        ran.append([bool(counted.again.get(fqn)) for fqn in LAYERS])
    told = gathered(str(rank).encode(), rank, shape.world_size, dist.distributed_c10d._get_default_store())
    return {"same": lab.same(result, step(reference_model)), "again": ran, "gathered": [t.decode() for t in told]}


def compiled(lab: Any, shape: ParallelDims, folder: Path, rank: int, backend: str) -> dict[str, Any]:
    """TorchTitan's compiled layers under FSDP: the first keeps its products, the second nothing."""
    calls = observed(configure(), shape, lab.Log())
    rows = {
        fqn: lab.decisions_from(
            found, {i for i, c in enumerate(found) if fqn == LAYERS[0] and c.op == "aten.mm.default"}
        )
        for fqn, found in calls.items()
    }
    path = folder / f"compiled-{rank}.json"
    lab.plan_for(bare(shape), rows, world_size=shape.world_size, early_stop=False).save(path)
    compiling = ("--compile.enable", "--compile.components", "model", "--compile.backend", backend)
    torch._dynamo.reset()
    plain = build(configure(*compiling, "--activation_checkpoint.mode", "none"), shape)
    wanted = step(plain)
    torch._dynamo.reset()
    model: Any = build(configure(*compiling, "--autosac.enable", "--autosac.plan", str(path)), shape)
    saved: list[int] = []
    for layer in model.layers.values():
        layer.register_forward_pre_hook(lambda *_: saved.append(0))
        layer.register_forward_hook(lambda *_: saved.append(0))  # what is saved between layers

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        if saved:
            saved[-1] += tensor.nbytes
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        found = step(model)
    return {
        "close": all(torch.allclose(a, b, rtol=1e-4, atol=1e-5) for a, b in zip(found, wanted, strict=True)),
        "saved": saved[::2],
        "products": sum(call.op == "aten.mm.default" for call in calls[LAYERS[0]]),
    }


def _is_part(some: list[str], all_of_them: list[str]) -> bool:
    """Whether `some` are among all of them, in their order, but not all."""
    rest = iter(all_of_them)
    return all(op in rest for op in some) and 0 < len(some) < len(all_of_them)


@contextmanager
def parcels() -> Iterator[list[str]]:
    """The classes of what goes to the host; nothing is too small for it."""
    found: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        original = offload.Parcel.__init__

        def init(self: Any, link: Any, tensor: torch.Tensor) -> None:
            original(self, link, tensor)
            found.append(type(tensor).__name__)

        patch.setattr(offload.Parcel, "__init__", init)
        patch.setattr(offload, "SMALLEST_OFFLOAD_BYTES", 0)
        yield found


def wrappers(model: nn.Module) -> list[nn.Module]:
    """The planned modules as they stand in the model, and what is inside them."""
    found = [find_module(model, fqn) for fqn in LAYERS]
    return [module for module in found if module is not None] + [unwrapped(m) for m in found if m is not None]


def _message(function: Callable[[], Any]) -> str:
    try:
        function()
    except AutosacError as e:
        return f"{type(e).__name__}: {e}"
    return ""


def exchange(plan: Plan, rank: int, folder: Path, world_size: int) -> dict[str, Any]:
    """Rank 0's plan, rank 0's failure, and files that differ between ranks."""
    store = dist.distributed_c10d._get_default_store()

    def fail() -> Plan:
        raise PlanError("no such thing")

    received = agree_on(lambda: plan, rank, store)
    failure = _message(lambda: agree_on(fail, rank, store))
    path = folder / f"own-{rank}.json"
    mine = dataclasses.replace(plan, units=plan.units[rank:])
    mine.save(path)
    # Not initialised: that takes part in collectives, and the rank that fails would not.
    job = configure("--autosac.enable", "--autosac.plan", str(path))
    differing = _message(lambda: parallelized(job, dims(world_size)))
    return {"hash": received.hash(), "failure": failure, "differing": differing}


def nested(lab: Any, make_case: Callable[[str], Any], world_size: int) -> dict[str, Any]:
    """FSDP units inside the checkpointed module, as TorchTitan shards experts: their hooks are not the plan's
    business.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    mesh = init_device_mesh("cpu", (world_size,))
    case = make_case("llama")

    def run(prepare: Callable[[nn.Module], Any], steps: int) -> tuple[torch.Tensor, ...]:
        model = copy.deepcopy(case.model)
        prepare(model)
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
        for layer in model.layers:
            for inner in (unwrapped(layer).w1, unwrapped(layer).w2):
                fully_shard(inner, mesh=mesh, mp_policy=policy)
            fully_shard(layer, mesh=mesh, mp_policy=policy)
        fully_shard(model, mesh=mesh, mp_policy=policy)
        for _ in range(steps):
            result = lab.step(model, case.tokens)
        return tuple(x.to_local() if hasattr(x, "to_local") else x for x in result)

    log = lab.Log()
    run(lambda model: observe(model, LAYERS, log), 2)
    calls = log.calls["layers.0"]
    groups = lab.groups_of(calls)
    rows = lab.decisions_from(calls, {i for group in groups[::2] for i in group})
    plan = lab.plan_for(case.model, dict.fromkeys(LAYERS, rows), early_stop=False)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        result = run(lambda model: apply(model, plan), 3)
    return {
        "same": lab.same(result, run(lambda _: None, 3)),
        "fsdp_operators": [call.op for call in calls if call.op.startswith(("fsdp", "c10d"))],
        "fallbacks": [str(w.message) for w in caught if w.category.__name__ == "PlanMismatchWarning"],
    }


def main(world_size: int, folder: Path) -> int:
    """All gloo ranks, in processes that are forked from this one: to import everything takes longer than what they do.

    The largest exit code.
    """
    root = Path(__file__).parents[2]
    sys.path += [str(root), str(root / "tests/support")]  # for `benchmarks` and `plans`
    spec = importlib.util.spec_from_file_location("lab", Path(__file__).with_name("conftest.py"))
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["lab"] = module
    spec.loader.exec_module(module)
    torch.set_num_threads(1)
    import_compiler()
    context, here = get_context("fork"), os.getpid()
    ranks = [
        context.Process(target=run_rank, args=(module, folder, rank, world_size, here)) for rank in range(world_size)
    ]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join()
    return max(abs(process.exitcode or 0) for process in ranks)


def run_rank(module: Any, folder: Path, rank: int, world_size: int, parent: int) -> None:
    """One gloo rank: FSDP2 over all ranks, then tensor parallelism over all ranks, the exchange of plans, FSDP2 with compiled
    layers. It ends with its parent.
    """
    lifeline.end_with(parent)
    store = dist.FileStore(str(folder / "store"), world_size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=timedelta(seconds=600))
    report = everything(module, folder, rank, world_size)
    (folder / f"report-{rank}.json").write_text(json.dumps(report))
    dist.barrier()
    dist.destroy_process_group()


def everything(module: Any, folder: Path, rank: int, world_size: int) -> dict[str, Any]:
    """What a rank reports, by subject."""
    report: dict[str, Any] = {}
    for name, shape in (("fsdp", dims(world_size)), ("tp", dims(world_size, tp=world_size))):
        report[name] = compare(module.Lab, shape, folder, rank)
        report[f"{name} offloads"] = compare(module.Lab, shape, folder, rank, offloads=True)
    plan = Plan.load(folder / f"plan-{rank}-1.json")
    report["switched"] = switched(module.Lab, dims(world_size), rank)
    report["exchange"] = exchange(plan, rank, folder, world_size)
    report["nested"] = nested(module.Lab, module.make_case, world_size)
    if SEES_RESULTS:
        from uncompiled import inductor

        torch._dynamo.register_backend(compiler_fn=inductor(), name="interpreted_inductor")
        for backend in ("aot_eager_decomp_partition", "interpreted_inductor"):
            report[backend] = compiled(module.Lab, dims(world_size), folder, rank, backend)
    return report


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), Path(sys.argv[2])))
