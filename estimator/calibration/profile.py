"""Writes a calibrated machine as a hardware profile (TOML), which names the files with its models and measurements.

A GPU of a known kind gets a profile based on the shipped one, with the host's costs measured; an unknown GPU and a CPU get a
whole profile of what was measured. Rates are those that were reached, so nothing of them is taken off again.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from autosac.errors import UsageError
from autosac.estimator.calibration.fitted import Calibrated
from autosac.estimator.calibration.machine import Machine
from autosac.estimator.hardware import Hardware, known_hardware
from autosac.files.writing import write_text_atomically

_RATES = ("float64", "float32", "tf32", "float16", "bfloat16", "float8", "int8")
_LAUNCH_FIELD = "eager_op_us"


def write_profile(
    path: Path, machine: Machine, calibrated: Calibrated, host_us: Mapping[str, float], measured: str, models: str
) -> None:
    """The profile; `measured` and `models` are the names of the files beside it."""
    if machine.device == "cpu":
        table = _cpu(machine, calibrated)
    else:
        table = _gpu(machine, calibrated, host_us)
    table |= {"description": machine.name, "measured": measured, "calibrated": models}
    tables: dict[str, Mapping[str, float]] = {}
    if "base" not in table:
        tables["peak_tflops"] = _rates(calibrated)
    if machine.device == "cpu" and host_us:
        tables["host"] = host_us
    about = ", ".join(f"{key} {value}" for key, value in calibrated.about.items())
    lines = [f"# Written by autosac calibrate: {about}.".replace("\n", " ")]
    lines += [f"{key} = {_toml(value)}" for key, value in table.items()]
    for name, numbers in tables.items():
        lines += ["", f"[{name}]", *(f"{key} = {_toml(value)}" for key, value in numbers.items())]
    write_text_atomically(path, "\n".join(lines) + "\n")


def profile_base(hardware: Hardware, output: Path, gpu: str) -> str:
    """What a profile is based on that corrects another. UsageError for a file elsewhere: profiles name none outside of their
    folder.
    """
    if hardware.name in known_hardware() and not gpu.endswith(".toml"):
        return hardware.name
    here, base = output.parent.resolve(), Path(gpu).resolve()
    if not base.is_relative_to(here) or base == output.resolve():
        raise UsageError(
            f"{gpu}: a profile that is based on a file must be in the same folder: write to another file in {base.parent}"
        )
    return str(base.relative_to(here))


def _toml(value: Any) -> str:
    """Strings, numbers and lists of numbers are written in TOML as in JSON."""
    return json.dumps(float(f"{value:.6g}") if isinstance(value, float) else value)


def _rates(calibrated: Calibrated) -> dict[str, float]:
    rates = {name: flops / 1e12 for name, flops in calibrated.peak_flops.items() if name in _RATES}
    if "float32" not in rates:
        rates["float32"] = max(rates.values(), default=0.1)
    return rates


def _cpu(machine: Machine, calibrated: Calibrated) -> dict[str, Any]:
    memory = calibrated.memory
    gbps = 1 / memory.read_ns_per_byte[-1] if memory is not None else calibrated.bandwidth / 1e9
    return {
        "name": "cpu",
        "device": "cpu",
        "source": "measured by autosac calibrate",
        "vendor": "CPU",
        "compute_capability": [0, 0],
        "sm_count": machine.threads,
        "boost_mhz": machine.clock_mhz,
        "tdp_w": 1.0,
        "memory_bytes": machine.total_bytes,
        "usable_bytes": machine.total_bytes,
        "mem_bandwidth_gbps": float(gbps),
        "l2_bytes": machine.cache_bytes,
        "link": "memory",
        "link_gbps": float(gbps),
        "pcie_gbps": float(gbps),
        "launch_us": 0.0,
        "kernel_us": calibrated.overhead_ms * 1e3,
        "context_bytes": 0,
        "cublas_workspace_bytes": 0,
        "cublaslt_workspace_bytes": 0,
    }


def known_gpu(machine: Machine) -> str:
    """The shipped profile of the machine's GPU; empty for a CPU and for a GPU that has none."""
    from autosac.estimator.gpu import match_gpu

    if machine.device == "cpu":
        return ""
    properties = torch.cuda.get_device_properties(machine.torch_device)
    capability = (properties.major, properties.minor)
    try:
        return match_gpu(properties.name, capability, properties.multi_processor_count, properties.total_memory)
    except UsageError:
        return ""


def _gpu(machine: Machine, calibrated: Calibrated, host_us: Mapping[str, float]) -> dict[str, Any]:
    launch = {"launch_us": host_us[_LAUNCH_FIELD]} if host_us.get(_LAUNCH_FIELD) else {}
    known = known_gpu(machine)
    if known:
        return {"base": known} | launch
    return _unknown_gpu(machine, calibrated, torch.cuda.get_device_properties(machine.torch_device)) | launch


def _unknown_gpu(machine: Machine, calibrated: Calibrated, properties: Any) -> dict[str, Any]:
    return {
        "name": properties.name.lower().replace(" ", "-"),
        "source": "measured by autosac calibrate",
        "vendor": "AMD" if torch.version.hip else "NVIDIA",
        "compute_capability": [properties.major, properties.minor],
        "sm_count": properties.multi_processor_count,
        "boost_mhz": machine.clock_mhz,
        "tdp_w": 1.0,
        "memory_bytes": machine.total_bytes,
        "usable_bytes": machine.total_bytes,
        "mem_bandwidth_gbps": calibrated.bandwidth / 1e9,
        "l2_bytes": machine.cache_bytes,
        "link": "PCIe",
        "link_gbps": 25.0,
        "pcie_gbps": 25.0,
        "launch_us": 6.0,
        "kernel_us": max(calibrated.overhead_ms * 1e3, 0.1),
        "context_bytes": 512 * 2**20,
        "cublas_workspace_bytes": (32 if properties.major >= 9 else 8) * 2**20,
        "cublaslt_workspace_bytes": 32 * 2**20,
    }
