"""Real training on the CPU by TorchTitan 0.3's own Trainer, with and without a plan.

A program that writes a report: ``python train.py FOLDER``.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import logging
import os
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
import torchtitan.tools.utils as titan_utils

# TorchTitan takes "cuda" where it finds no accelerator. Its other modules copy these two names.
titan_utils.device_type, titan_utils.device_module = "cpu", torch.cpu

import torchtitan.components.metrics as titan_metrics  # noqa: E402
from torch import nn  # noqa: E402

from autosac.capture.jobs.titan_v03 import TitanV03  # noqa: E402
from autosac.capture.request import TitanRequest  # noqa: E402
from autosac.errors import AutosacError  # noqa: E402
from autosac.integrations.observe import observe  # noqa: E402
from autosac.integrations.torchtitan import AutoSAC  # noqa: E402
from autosac.plans import Plan  # noqa: E402
from autosac.titan.settings import python_job_settings  # noqa: E402

LAYERS = ["layers.0", "layers.1"]
STEPS = 3


def load_lab() -> ModuleType:
    """The helpers of tests/integrations."""
    tests = Path(__file__).parents[1]
    sys.path += [str(tests.parent), str(tests / "support")]  # for `benchmarks`, and for `plans`
    spec = importlib.util.spec_from_file_location("lab", tests / "integrations" / "conftest.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["lab"] = module
    spec.loader.exec_module(module)
    return module


def without_memory_statistics() -> None:
    """The CPU has none that TorchTitan could ask for."""
    stats = titan_metrics.DeviceMemStats(*[0] * 6)
    monitor = SimpleNamespace(device_name="cpu", get_peak_stats=lambda: stats, reset_peak_stats=lambda: None)
    titan_metrics.build_device_memory_monitor = lambda: monitor


def configuration(*overrides: str) -> Any:
    """The tiny job with synthetic data and no checkpointing."""
    config = TitanV03().parse(TitanRequest(config_file="jobs:tiny", overrides=overrides, checkpointing="none"))
    config.comm.mode = "default"
    return config


def trainer_of(config: Any, policy: Any = None, transform: Callable[[nn.Module], None] | None = None) -> Any:
    """TorchTitan's Trainer for the job under a checkpointing policy, or with a function of the model in its place."""
    trainer = TitanV03().build(dataclasses.replace(config, activation_checkpoint=policy), transform)
    trainer.logged = []
    trainer.metrics_processor.log = lambda step, loss, largest, norm, **_: trainer.logged.append((loss, norm))
    return trainer


def train(trainer: Any) -> tuple[list[Any], list[torch.Tensor]]:
    """(loss and gradient norm of every step, gradients of the last one and the parameters that it left)."""
    batches = trainer.batch_generator(trainer.dataloader)
    for step in range(1, STEPS + 1):
        trainer.step = step
        trainer.train_step(batches)
    parameters = list(trainer.model_parts[0].parameters())
    tensors = [tensor for p in parameters for tensor in (p.grad, p.detach())]
    return trainer.logged, [t.full_tensor() if hasattr(t, "full_tensor") else t for t in tensors]


def same(a: tuple[list[Any], list[torch.Tensor]], b: tuple[list[Any], list[torch.Tensor]]) -> bool:
    """Bitwise equality."""
    return a[0] == b[0] and len(a[1]) == len(b[1]) and all(torch.equal(x, y) for x, y in zip(a[1], b[1], strict=True))


def message(function: Callable[[], Any]) -> str:
    """The error that a call ends with."""
    try:
        function()
    except AutosacError as e:
        return f"{type(e).__name__}: {e}"
    return ""


def compare(lab: Any, folder: Path) -> tuple[dict[str, Any], Plan]:
    """Every 2nd group of operators of each layer kept, against no checkpointing."""
    config = configuration()
    bare = trainer_of(config)
    reference = train(bare)
    log = lab.Log()
    with torch.autograd.graph.saved_tensors_hooks(log.pack, lambda saved: saved.tensor):
        train(trainer_of(config, transform=lambda model: observe(model, LAYERS, log)))
    groups = lab.groups_of(log.calls["layers.0"])
    keep = {i for group in groups[::2] for i in group}
    rows = {fqn: lab.decisions_from(log.calls[fqn], keep) for fqn in LAYERS}
    plan = lab.plan_for(bare.model_parts[0], rows, early_stop=False)
    plan = dataclasses.replace(
        plan, made_for=dataclasses.replace(plan.made_for, job_settings=python_job_settings(config))
    )
    plan.save(folder / "plan.json")
    trainer = trainer_of(config, AutoSAC.Config(plan=str(folder / "plan.json")))
    with warnings.catch_warnings(record=True) as caught, lab.counting(trainer.model_parts[0], LAYERS) as ran:
        warnings.simplefilter("always")
        result = train(trainer)
    forward = [call.op for call in log.calls["layers.1"]]
    again = [forward[i] for i in lab.must_run(log.calls["layers.1"], keep)]
    return {
        "same": same(result, reference),
        "losses": [loss for loss, _ in result[0]],
        "tensors": len(result[1]),
        "kept": len(keep),
        "operators": len(forward),
        "as_planned": ran.forward["layers.1"] == forward * STEPS and ran.again["layers.1"] == again * STEPS,
        "fallbacks": [str(w.message) for w in caught if w.category.__name__ == "PlanMismatchWarning"],
        "classes": [type(module).__name__ for module in trainer.model_parts[0].layers.values()],
    }, plan


def compiled(lab: Any, plan: Plan, folder: Path) -> dict[str, Any]:
    """Compiled layers, of which the first keeps its products and the second nothing, against no checkpointing."""
    config = configuration("--compile.enable", "--compile.backend", "aot_eager_decomp_partition")
    reference = train(trainer_of(config))
    torch._dynamo.reset()
    units = tuple(
        dataclasses.replace(
            unit,
            decisions=tuple(
                dataclasses.replace(d, keep=unit.fqn == LAYERS[0] and d.op == "aten.mm.default") for d in unit.decisions
            ),
        )
        for unit in plan.units
    )
    made_for = dataclasses.replace(plan.made_for, job_settings=python_job_settings(config))
    dataclasses.replace(plan, made_for=made_for, units=units).save(folder / "compiled.json")
    trainer = trainer_of(config, AutoSAC.Config(plan=str(folder / "compiled.json")))
    saved: list[int] = []
    for layer in trainer.model_parts[0].layers.values():
        layer.register_forward_pre_hook(lambda *_: saved.append(0))
        layer.register_forward_hook(lambda *_: saved.append(0))  # what is saved between layers

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        if saved:
            saved[-1] += tensor.nbytes
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        result = train(trainer)
    return {
        "close": all(torch.allclose(a, b, rtol=1e-4, atol=1e-5) for a, b in zip(result[1], reference[1], strict=True)),
        "saved": saved[::2],
    }


def own(plan: Plan, folder: Path) -> dict[str, Any]:
    """A plan that is TorchTitan's own full checkpointing, against none."""
    config = configuration()
    plan = dataclasses.replace(
        plan,
        made_for=dataclasses.replace(plan.made_for, job_settings=python_job_settings(config)),
        units=(),
        settings=dataclasses.replace(plan.settings, job_checkpointing="full"),
    )
    plan.save(folder / "own.json")
    trainer = trainer_of(config, AutoSAC.Config(plan=str(folder / "own.json")))
    other = folder / "own_other.json"
    made_for = dataclasses.replace(plan.made_for, parameters=plan.made_for.parameters[1:], job_settings={})
    dataclasses.replace(plan, made_for=made_for).save(other)
    return {
        "classes": [type(module).__name__ for module in trainer.model_parts[0].layers.values()],
        "same": same(train(trainer), train(trainer_of(config))),
        "other": message(lambda: trainer_of(config, AutoSAC.Config(plan=str(other)))),
    }


def misfits(plan: Plan, folder: Path) -> dict[str, str]:
    """What a job is told that asks for too much, or for a plan that was not made for it."""
    path = str(folder / "plan.json")
    other_world = folder / "world.json"
    dataclasses.replace(plan, made_for=dataclasses.replace(plan.made_for, world_size=16)).save(other_world)

    def told(policy: Any, *overrides: str) -> str:
        return message(lambda: trainer_of(configuration(*overrides), policy))

    shallow = configuration()
    del shallow.model_spec.model.layers[1:]
    no_settings = folder / "model.json"
    dataclasses.replace(plan, made_for=dataclasses.replace(plan.made_for, job_settings={})).save(no_settings)
    return {
        "both": told(AutoSAC.Config(plan=path, budget="60GiB")),
        "missing": told(AutoSAC.Config(plan=str(folder / "none.json"))),
        "nameless": told(AutoSAC.Config(budget="60GiB")),
        "world": told(AutoSAC.Config(plan=str(other_world))),
        "setting": told(AutoSAC.Config(plan=path), "--training.seq_len", "128"),
        "model": message(lambda: trainer_of(shallow, AutoSAC.Config(plan=path))),
        "parameters": message(lambda: trainer_of(shallow, AutoSAC.Config(plan=str(no_settings)))),
    }


def main(folder: Path) -> None:
    """Write report.json into the folder."""
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)
    os.environ.update(LOCAL_RANK="0", RANK="0", WORLD_SIZE="1")
    store = dist.FileStore(str(folder / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    without_memory_statistics()
    lab = load_lab()
    report, plan = compare(lab, folder)
    report["compiled"] = compiled(lab, plan, folder)
    report["own"] = own(plan, folder)
    report["misfits"] = misfits(plan, folder)
    (folder / "report.json").write_text(json.dumps(report))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
