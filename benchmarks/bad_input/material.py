"""Valid inputs of every kind, which the generator then spoils. All of them are small, and none is captured."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Any

from autosac.estimator import profiles
from autosac.plans import Decision, MadeFor, Plan, Prediction, Unit
from autosac.trace import (
    Alloc,
    Call,
    Collective,
    EventRecord,
    EventWait,
    Free,
    Group,
    HostWait,
    Label,
    ModuleEnter,
    ModuleExit,
    Op,
    Parallelism,
    Phase,
    Region,
    Signature,
    StepBegin,
    Storage,
    TensorMeta,
    Trace,
    TraceInfo,
    WorkWait,
)

GPU = "h100-sxm-80gb"
JOB: dict[str, Any] = {
    "job": {"dump_folder": "./outputs", "description": "a job", "print_config": False},
    "model": {"name": "llama3", "flavor": "debugmodel", "converters": []},
    "optimizer": {"name": "AdamW", "lr": 8e-4, "implementation": "fused"},
    "training": {"local_batch_size": 8, "seq_len": 2048, "max_norm": 1.0, "steps": 10, "dtype": "float32"},
    "parallelism": {
        "data_parallel_replicate_degree": 1,
        "data_parallel_shard_degree": -1,
        "tensor_parallel_degree": 1,
        "pipeline_parallel_degree": 1,
        "context_parallel_degree": 1,
        "pipeline_parallel_schedule": "1F1B",
    },
    "activation_checkpoint": {"mode": "none", "selective_ac_option": "op"},
    "compile": {"enable": False, "components": ["model", "loss"]},
    "checkpoint": {"enable": False, "interval": 500},
}
SUITE: dict[str, Any] = {
    "name": "Tiny",
    "gpu": GPU,
    "budgets": ["40GiB", "50GiB"],
    "budget_kind": "active",
    "policies": ["none", "full", "knapsack"],
    "milp": "cbc",
    "time_limit_s": 10.0,
    "gap": 0.01,
    "utilisation": 0.9,
    "models": [
        {
            "name": "toy",
            "make_step": "model.py:make_step",
            "blocks": ["blocks.*"],
            "world_size": 1,
            "configurations": [{"name": "C1", "tokens": 8}, {"name": "C2", "tokens": 16}],
        }
    ],
}
MODEL = "def make_step(device, *, tokens):\n    raise RuntimeError('nothing is to be run')\n"
MEASURED: dict[str, Any] = {
    "format": "autosac-measured",
    "schema": 1,
    "operators": [["aten.mm.default(x)->y", 0.5, 0.01], ["aten.add.Tensor(x)->y", 0.1, 0.02]],
}
CALIBRATED: dict[str, Any] = {
    "format": "autosac-calibrated",
    "schema": 1,
    "device": "cuda",
    "overhead_ms": 0.002,
    "peak_flops": {"bfloat16": 9e14, "float32": 6e13},
    "bandwidth": 3e12,
    "groups": {
        "elementwise:bfloat16": {
            "points": [[1.0, 2.0], [3.0, 4.0]],
            "alpha": [0.1, 0.2],
            "scales": [1.0, 1.0],
            "amplitude": 1.0,
            "mean": 0.0,
            "rel_std": 0.1,
        }
    },
    "collectives": [["all_reduce", 2, 1024, 0.01]],
    "memory": None,
    "about": {"date": "2026-01-01"},
}


def plan() -> dict[str, Any]:
    """A plan of two units as its file holds it."""
    shape = (((8, 16), "bfloat16"),)
    decisions = (
        Decision(
            op="aten.mm.default", occurrence=0, keep=True, outputs=shape, memory_bytes=256, runtime_ms=0.5, msps=512.0
        ),
        Decision(op="aten.mm.default", occurrence=1, keep=False, outputs=shape, memory_bytes=256, runtime_ms=0.1),
    )
    units = tuple(
        Unit(
            fqn=f"layers.{i}",
            discard_fraction=0.5,
            kept_bytes=256,
            recompute_ms=0.1,
            decisions=decisions,
            parameters=(("weight", (16, 16)),),
        )
        for i in range(2)
    )
    prediction = Prediction(
        step_ms=10.0, peak_active_bytes=2**30, peak_reserved_bytes=2**31, fits=True, recompute_ms=1.0
    )
    made_for = MadeFor(
        job_fingerprint="f",
        model="llama3 debugmodel",
        torch_version="2.13",
        torchtitan_version="0.2.2",
        gpu=GPU,
        world_size=2,
        budget_bytes=2**32,
        budget_kind="reserved",
        parameters=(("layers.0.weight", (16, 16)),),
        job_settings={"model.name": "llama3"},
    )
    made = Plan(made_for=made_for, units=units, predictions={"autosac": prediction, "none": prediction})
    document: dict[str, Any] = json.loads(made.to_bytes())
    return document


_WEIGHT, _ROWS = TensorMeta((256, 256), (256, 1), "bfloat16"), TensorMeta((64, 256), (256, 1), "bfloat16")


def _tables() -> tuple[tuple[Signature, ...], tuple[Storage, ...]]:
    signatures = (
        Signature("aten.mm.default", (_ROWS, _WEIGHT), (_ROWS,)),
        Signature("aten.relu.default", (_ROWS,), (_ROWS,)),
        Signature("aten.mm.default", (_WEIGHT, _ROWS), (_WEIGHT,), (("alpha", 1), ("dims", (0, 1)))),
        Signature("c10d.allreduce_.default", (_WEIGHT,), (_WEIGHT,), (("group", "dp"),)),
        Signature("aten._fused_adamw_.default", (_WEIGHT, _WEIGHT), (), (), False, False, (0,)),
    )
    storages = tuple(
        Storage(nbytes, 0, label, phase, 1, 1, op)
        for nbytes, label, phase, op in (
            (2**17, Label.PARAMETER, Phase.SETUP, "aten.empty.memory_format"),
            (2**15, Label.INPUT, Phase.SETUP, "aten.empty.memory_format"),
            (2**15, Label.NONE, Phase.FORWARD, "aten.mm.default"),
            (2**15, Label.NONE, Phase.FORWARD, "aten.relu.default"),
            (2**17, Label.GRADIENT, Phase.BACKWARD, "aten.mm.default"),
        )
    )
    return signatures, storages


def capture() -> Trace:
    """A step of one linear layer on two ranks: forward, backward with a reduction of its gradient, optimizer."""
    signatures, storages = _tables()
    rows = _ROWS
    events = (
        ModuleEnter(1, Phase.FORWARD),
        Op(0, 0, 1, Phase.FORWARD, 1, (1, 0), (2,)),
        Alloc(2),
        Op(1, 0, 1, Phase.FORWARD, 1, (2,), (3,)),
        Alloc(3),
        ModuleExit(1, Phase.FORWARD),
        Op(2, 0, 1, Phase.BACKWARD, 1, (3, 2), (4,)),
        Alloc(4),
        Free(2),
        EventRecord(1, 0),
        EventWait(1, 1),
        Collective("all_reduce", 2**17, 0, 1, True, 1, -1, -1, 3, 1, Phase.BACKWARD, 1, (4,), (4,)),
        WorkWait(1, 0),
        Free(3),
        Op(4, 0, 0, Phase.OPTIMIZER, 1, (0, 4), ()),
        Free(4),
        HostWait(0, -1, "stream"),
    )
    calls = (
        Call("aten.mm.default", 0, (rows,), 1, 3, False, False, False, (2,), (1, 0), (), (2,)),
        Call("aten.relu.default", 0, (rows,), 3, 5, False, False, False, (3,), (2,), (), (3,)),
    )
    return Trace(
        info=TraceInfo(
            job_fingerprint="f",
            job_settings={"model.name": "toy"},
            model="toy",
            world_size=2,
            gpu="NVIDIA H100",
            local_batch_size=1,
            seq_len=64,
            tokens_per_step=64,
            flops_per_token=1e6,
            parallelism=Parallelism(dp_shard=2),
            parameter_shapes={"layers.0.weight": (256, 256)},
            fsdp_units=("layers.0",),
            checkpointing="none",
            early_stop=False,
            torch_version="2.13",
            torchtitan_version="0.2.2",
        ),
        signatures=signatures,
        storages=storages,
        modules=("", "layers.0"),
        module_parents=(-1, 0),
        module_classes=("Model", "Linear"),
        sources=("", "model.py:3"),
        groups=(Group.of("dp", (0, 1)),),
        prologue=(Alloc(0), Alloc(1), StepBegin(1)),
        events=events,
        regions=(Region(1, 0, 6, calls, (1,), (3,)),),
        streams=("compute", "stream 1"),
    )


def shipped(kind: str, name: str) -> dict[str, Any]:
    """The table of a shipped profile ("hardware", "clusters"), with what it is based on."""
    table, _ = profiles.read(kind, name)
    table.pop("measured", None)
    table.pop("calibrated", None)
    return table


def toml_of(table: dict[str, Any]) -> str:
    """A table as TOML; tables within are written inline."""
    return "".join(f"{_key(key)} = {_value(value)}\n" for key, value in table.items())


def _key(key: str) -> str:
    return key if key.replace("_", "").replace("-", "").isascii() and key.isidentifier() else json.dumps(key)


def _value(value: Any) -> str:
    if isinstance(value, Raw):
        return value.text
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return json.dumps(value).replace("\x7f", "\\u007f")
    if isinstance(value, list):
        return "[" + ", ".join(map(_value, value)) + "]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{_key(key)} = {_value(item)}" for key, item in value.items()) + "}"
    return repr(value)


class Raw:
    """A value as it is to be written."""

    def __init__(self, text: str) -> None:
        self.text = text


def check() -> None:
    """The TOML writer writes what it is given."""
    for table in (JOB, SUITE, shipped("hardware", GPU), shipped("clusters", "hgx-h100")):
        assert tomllib.loads(toml_of(table)) == table


def write_models(folder: Path) -> None:
    """The Python file that the suite names."""
    (folder / "model.py").write_text(MODEL)
