"""Hardware profiles: what the models need to know of a GPU, and what the simulators need of its software.

A profile is a TOML file (see `data/hardware`); `load_hardware` takes the name of a shipped one or a path.
Figures are those of one direction for links, dense for arithmetic, and 1 GB/s is 10^9 bytes per second.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Annotated, Any, ClassVar, Literal

from autosac.estimator import profiles
from autosac.estimator.profiles import Bytes, BytesOrNone, MoreBytes, NotNegative, Positive, Text
from autosac.files.schema import STRICT, Name, Pairs, Within

_RATES = ("float64", "float32", "tf32", "float16", "bfloat16", "float8", "float4", "int8")
_EFFICIENCIES = (
    "matmul",
    "matmul_float32",
    "batched_matmul",
    "convolution",
    "depthwise",
    "attention_forward",
    "attention_backward",
    "attention_math",
    "memory",
    "reduction",
    "outer_reduction",
    "norm_backward",
    "gather",
    "scatter",
    "link",
    "sustained",
)

MEMORY_POWER = 0.23
"""What memory traffic draws of a GPU's TDP beside what an idle GPU draws, where a profile does not say (`power.py`)."""

_HOST_COSTS = (
    "eager_op_us",
    "backward_op_us",
    "optimizer_op_us",
    "view_op_us",
    "module_us",
    "recompute_op_us",
    "checkpoint_us",
    "selective_op_us",
    "saved_op_us",
    "wrapper_us",
    "wrapped_tensor_us",
    "functional_collective_us",
    "gather_us",
    "gathered_parameter_us",
    "reduction_us",
    "reduced_parameter_us",
)
_FILES = ("measured", "calibrated", "corrected", "run_corrected")
Capability = Annotated[int, Within(0, 99)]
Efficiency = Annotated[float, Within(1e-4, 4.0)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Hardware:
    """One GPU type. `device_name`: what its driver calls it, and so ``torch.cuda.get_device_name()``. `source`: where its peak
    rates, memory and links are from.

    `memory_bytes` is the nominal size; `usable_bytes` is what CUDA reports as total: budgets and
    out-of-memory verdicts are about the latter. `context_bytes` is what the CUDA context and loaded kernels
    take outside of PyTorch. `launch_us` is what an eager PyTorch operator costs its host thread, `kernel_us`
    the shortest device time of a kernel. `peak_tflops` are dense peak rates by arithmetic ("tf32" is float32
    input on tensor cores, "float8" any 8-bit float); `efficiency` overrides the roofline model's defaults.
    `link_gbps` is GPU to GPU within a node, `pcie_gbps` GPU to host. `cluster` names the preset that such GPUs usually
    come in, `models_of` the profile whose fitted models serve this one (scaled); `measured` is a file of measured
    operators that come before any model, `calibrated` a file of models fitted on such a machine, which come next,
    `corrected` a file of corrections of the shipped models, `run_corrected` one of all prices, by the first steps of a run.
    Empty where there is none. `more_active_bytes`, `more_reserved_bytes`: how much higher the peaks of that run were than
    simulated (below 0: lower). `device` is what PyTorch calls
    it: on a "cpu" the host runs the operators itself, one after the other. `host`: costs of `runtime_sim.HostModel` that
    were measured, by name. `power_limit_w`: the cap that the GPU runs under (`power.py`), 0 for that of the part, `tdp_w`.
    `product_power`: what matrix products in 8 and 16 bits alone would draw at the rates that the models know, relative to
    `tdp_w`; above 1 where these rates were measured in bursts. `memory_power`: what memory traffic draws of it, beside an idle
    GPU. `product_mhz`: the clock at which products in 8 and 16 bits run at the rates that the models know, 0 if nobody has
    measured it; `locked_mhz`: the clock that the GPU is locked to, 0 for none.
    """

    __pydantic_config__: ClassVar[Any] = STRICT

    name: Name
    description: Text = ""
    device_name: Text = ""
    source: Text = ""
    vendor: Name
    compute_capability: tuple[Capability, Capability]
    sm_count: Annotated[int, Within(1, 2**16)]
    boost_mhz: Positive
    tdp_w: Positive
    memory_bytes: Bytes
    usable_bytes: Bytes
    mem_bandwidth_gbps: Positive
    l2_bytes: Bytes
    link: Name
    link_gbps: Positive
    pcie_gbps: Positive
    launch_us: NotNegative
    kernel_us: NotNegative
    context_bytes: BytesOrNone
    cublas_workspace_bytes: BytesOrNone
    cublaslt_workspace_bytes: BytesOrNone
    peak_tflops: Annotated[tuple[tuple[str, Positive], ...], Pairs(_RATES)]
    efficiency: Annotated[tuple[tuple[str, Efficiency], ...], Pairs(_EFFICIENCIES)] = ()
    cluster: Text = ""
    models_of: Text = ""
    measured: Text = ""
    calibrated: Text = ""
    corrected: Text = ""
    run_corrected: Text = ""
    more_active_bytes: MoreBytes = 0
    more_reserved_bytes: MoreBytes = 0
    device: Literal["cuda", "cpu"] = "cuda"
    host: Annotated[tuple[tuple[str, NotNegative], ...], Pairs(_HOST_COSTS)] = ()
    power_limit_w: NotNegative = 0.0
    product_power: Positive = 1.0
    memory_power: Positive = MEMORY_POWER
    product_mhz: NotNegative = 0.0
    locked_mhz: NotNegative = 0.0

    def __post_init__(self) -> None:
        if self.usable_bytes > self.memory_bytes:
            raise ValueError("usable_bytes is above memory_bytes")
        if "float32" not in dict(self.peak_tflops):
            raise ValueError("peak_tflops.float32 is missing")
        if "/" in self.models_of:
            raise ValueError(f"models_of must be the name of a profile, not {self.models_of!r}")
        for name, value in self.efficiency:
            if value > 1 and not name.startswith(
                "sustained"
            ):  # which is relative to what another GPU reaches of its peak
                raise ValueError(f"efficiency.{name} must be at most 1, not {value!r}")

    def peak_flops(self, arithmetic: str) -> float:
        """Peak dense rate in FLOP/s of "float32", "tf32", "bfloat16", "float8", ...

        A rate that the profile does not give is that of the next wider type that it has.
        """
        rates = dict(self.peak_tflops)
        wider = {"float4": "float8", "float8": "bfloat16", "int8": "bfloat16", "tf32": "float32"}
        wider |= {"float16": "bfloat16", "bfloat16": "float32"}
        while arithmetic not in rates and arithmetic in wider:
            arithmetic = wider[arithmetic]
        if arithmetic == "float64" and "float64" not in rates:
            return rates["float32"] * 1e12 / 64
        return rates.get(arithmetic, rates["float32"]) * 1e12

    @property
    def half(self) -> str:
        """The type of 16 bits that its matrix units take: "bfloat16", and "float16" where they do not know that."""
        rates = dict(self.peak_tflops)
        return "float16" if "float16" in rates and "bfloat16" not in rates else "bfloat16"

    def multiplies(self, arithmetic: str) -> bool:
        """Whether it has units for this arithmetic, as its profile's `peak_tflops` calls it."""
        return arithmetic in dict(self.peak_tflops)

    def fitted_elsewhere(self, name: str) -> str:
        """How the source of a price ends that was fitted to the GPU `name`: ``@name``, or nothing if it is this one."""
        return "" if self.name == name else f"@{name}"


def known_hardware() -> tuple[str, ...]:
    """The names of the shipped GPU profiles."""
    return profiles.shipped("hardware")


@lru_cache(maxsize=64)
def load_hardware(name_or_path: str) -> Hardware:
    """The profile of a GPU by name ("h100-sxm-80gb") or from a TOML file.

    HardwareError if it is unknown or wrong.
    """
    table, path = profiles.read("hardware", name_or_path)
    hardware = profiles.value_of(table, Hardware, path)
    named = {key: file for key in _FILES if (file := getattr(hardware, key))}
    if "/" in hardware.cluster or hardware.cluster.endswith(".toml"):
        named["cluster"] = hardware.cluster
    files: dict[str, Any] = {key: str(profiles.beside(path, key, file)) for key, file in named.items()}
    return replace(hardware, **files)
