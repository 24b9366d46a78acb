"""Hardware profiles: what the models need to know of a GPU, and what the simulators need of its software.

A profile is a TOML file (see `data/hardware`); `load_hardware` takes the name of a shipped one or a path.
Figures are those of one direction for links, dense for arithmetic, and 1 GB/s is 10^9 bytes per second.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import lru_cache

from autosac.estimator import profiles

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
)


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

    name: str
    description: str
    device_name: str = ""
    source: str = ""
    vendor: str
    compute_capability: tuple[int, int]
    sm_count: int
    boost_mhz: float
    tdp_w: float
    memory_bytes: int
    usable_bytes: int
    mem_bandwidth_gbps: float
    l2_bytes: int
    link: str
    link_gbps: float
    pcie_gbps: float
    launch_us: float
    kernel_us: float
    context_bytes: int
    cublas_workspace_bytes: int
    cublaslt_workspace_bytes: int
    peak_tflops: tuple[tuple[str, float], ...]
    efficiency: tuple[tuple[str, float], ...] = ()
    cluster: str = ""
    models_of: str = ""
    measured: str = ""
    calibrated: str = ""
    corrected: str = ""
    run_corrected: str = ""
    more_active_bytes: int = 0
    more_reserved_bytes: int = 0
    device: str = "cuda"
    host: tuple[tuple[str, float], ...] = ()
    power_limit_w: float = 0.0
    product_power: float = 1.0
    memory_power: float = MEMORY_POWER
    product_mhz: float = 0.0
    locked_mhz: float = 0.0

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
    reader = profiles.Reader(table, path, [field.name for field in fields(Hardware)])
    capability = reader.integers("compute_capability", 2, 99)
    measured, calibrated = reader.text("measured", ""), reader.text("calibrated", "")
    corrected, run_corrected = reader.text("corrected", ""), reader.text("run_corrected", "")
    cluster, models_of = reader.text("cluster", ""), reader.text("models_of", "")
    if "/" in models_of:
        reader.fail("models_of", f"must be the name of a profile, not {models_of!r}")
    if "/" in cluster or cluster.endswith(".toml"):
        cluster = str(profiles.beside(path, "cluster", cluster))
    hardware = Hardware(
        name=reader.text("name"),
        description=reader.text("description", ""),
        device_name=reader.text("device_name", ""),
        source=reader.text("source", ""),
        vendor=reader.text("vendor"),
        compute_capability=(capability[0], capability[1]),
        sm_count=reader.integer("sm_count", most=2**16),
        boost_mhz=reader.number("boost_mhz"),
        tdp_w=reader.number("tdp_w"),
        memory_bytes=reader.integer("memory_bytes"),
        usable_bytes=reader.integer("usable_bytes"),
        mem_bandwidth_gbps=reader.number("mem_bandwidth_gbps"),
        l2_bytes=reader.integer("l2_bytes"),
        link=reader.text("link"),
        link_gbps=reader.number("link_gbps"),
        pcie_gbps=reader.number("pcie_gbps"),
        launch_us=reader.number("launch_us", zero=True),
        kernel_us=reader.number("kernel_us", zero=True),
        context_bytes=reader.integer("context_bytes", zero=True),
        cublas_workspace_bytes=reader.integer("cublas_workspace_bytes", zero=True),
        cublaslt_workspace_bytes=reader.integer("cublaslt_workspace_bytes", zero=True),
        peak_tflops=tuple(reader.table("peak_tflops", _RATES, needed=("float32",)).items()),
        efficiency=tuple(reader.table("efficiency", _EFFICIENCIES, most=4.0).items()),
        cluster=cluster,
        models_of=models_of,
        measured=str(profiles.beside(path, "measured", measured)) if measured else "",
        calibrated=str(profiles.beside(path, "calibrated", calibrated)) if calibrated else "",
        corrected=str(profiles.beside(path, "corrected", corrected)) if corrected else "",
        run_corrected=str(profiles.beside(path, "run_corrected", run_corrected)) if run_corrected else "",
        more_active_bytes=reader.change("more_active_bytes"),
        more_reserved_bytes=reader.change("more_reserved_bytes"),
        device=reader.text("device", "cuda"),
        host=tuple(reader.table("host", _HOST_COSTS, zero=True).items()),
        power_limit_w=reader.number("power_limit_w", 0.0, zero=True),
        product_power=reader.number("product_power", 1.0),
        memory_power=reader.number("memory_power", MEMORY_POWER),
        product_mhz=reader.number("product_mhz", 0.0, zero=True),
        locked_mhz=reader.number("locked_mhz", 0.0, zero=True),
    )
    if hardware.usable_bytes > hardware.memory_bytes:
        reader.fail("usable_bytes", "is above memory_bytes")
    if hardware.device not in ("cuda", "cpu"):
        reader.fail("device", f"must be cuda or cpu, not {hardware.device!r}")
    for name, value in hardware.efficiency:
        if value > 1 and not name.startswith("sustained"):  # which is relative to what another GPU reaches of its peak
            reader.fail(f"efficiency.{name}", f"must be at most 1, not {value!r}")
    return hardware
