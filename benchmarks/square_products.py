"""The fastest square products of many GPUs beside what their owners measured.

    python -m benchmarks.square_products --table database.md

`database.md` is a table of zzc0721/torch-performance-test-data: owners of GPUs ran ``torch.mm`` of square matrices of 1,024 to
10,240 rows, 30 times in a row, in float32, with TF32, in float16 and in bfloat16; the table has the fastest of five sizes.
Laptops and parts that no profile is made for are left out. Prints TFLOP/s, and the error of each GPU and type against the
median of its rows.
"""

from __future__ import annotations

import argparse
import re
import statistics
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

import autosac
from autosac.errors import AutosacError
from autosac.estimator import load_hardware, price
from autosac.trace import Op

SIZES = (1024, 2048, 4096, 8192, 10240)
TYPES = ("float32", "tf32", "float16", "bfloat16")
# Profile -> devices of the table: the whole name after "NVIDIA", "GeForce", "RTX" and "Tesla".
NAMES = {
    "v100-sxm2-16gb": "V100-SXM2-16GB",
    "t4": "T4 16GB",
    "rtx-2080-ti": "2080 Ti 22GB",
    "a100-pcie-40gb": "A100-PCIE-40GB|A100 40GB",
    "a100-sxm-80gb": "A100 SXM4 80GB|A800 SXM4 80GB",
    "rtx-3080-10gb": "3080 10GB",
    "rtx-3090": "3090|3090 24GB",
    "rtx-a6000": "A6000",
    "l4": "L4",
    "l40s": "L40S",
    "rtx-4090": "4090|4090 24GB|4090 48GB",
    "h20-96gb": "H20|H20 96GB",
    "h100-pcie-80gb": "H100 PCIe|H800 PCIe",
    "h100-sxm-80gb": "H100 80GB HBM3",
    "h200-sxm-141gb": "H200",
    "b200-sxm-180gb": "B200 180GB",
    "rtx-5090": "5090|5090 32GB",
    "rtx-pro-6000": "PRO 6000 Workstation 96G|PRO 6000 Blackwell Server Edition",
}


def published(table: Path) -> dict[tuple[str, str], list[float]]:
    """TFLOP/s by profile and type, one for each row of the table."""
    found: dict[tuple[str, str], list[float]] = defaultdict(list)
    for line in table.read_text(encoding="utf-8").splitlines():
        cells = [cell.strip() for cell in line.split("|")[1:]]
        if not cells or not cells[0].startswith("NVIDIA"):
            continue
        device = re.sub(r"^NVIDIA |GeForce |RTX |Tesla ", "", cells[0])
        for profile, pattern in NAMES.items():
            if re.fullmatch(pattern, device):
                for kind, cell in zip(TYPES, cells[1:5], strict=True):
                    if re.fullmatch(r"[\d.]+", cell):
                        found[profile, kind].append(float(cell))
    return found


def predicted(gpu: str, kind: str) -> float:
    """TFLOP/s of the fastest size."""
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = kind == "tf32"
    try:
        simulation = autosac.simulate(_products(getattr(torch, "float32" if kind == "tf32" else kind)), gpu=gpu)
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before
    prices = price(simulation.trace, load_hardware(gpu)).event_ms.tolist()
    ms = [
        ms
        for event, ms in zip(simulation.trace.events, prices, strict=True)
        if type(event) is Op and simulation.trace.signatures[event.signature].name.startswith("aten.mm")
    ]
    return max(2 * size**3 / 1e9 / ms for size, ms in zip(SIZES, ms, strict=False))


def _products(dtype: torch.dtype) -> Callable[[torch.device], tuple[nn.Module, Callable[[], None]]]:
    def make_step(device: torch.device) -> tuple[nn.Module, Callable[[], None]]:
        model = nn.Linear(8, 8).to(device)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        factors = [torch.empty(size, size, device=device, dtype=dtype) for size in SIZES]

        def step() -> None:
            with torch.no_grad():
                for factor in factors:
                    torch.mm(factor, factor)
            model(torch.ones(1, 8, device=device)).sum().backward()
            optimizer.step()

        return model, step

    return make_step


def main() -> None:
    """See the module's docstring."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.square_products", description=__doc__.splitlines()[0])
    parser.add_argument("--table", type=Path, required=True, metavar="database.md")
    arguments = parser.parse_args()
    truth = published(arguments.table)
    errors = defaultdict(list)
    print(f"{'GPU':16} {'type':9} {'rows':>4} {'published':>18} {'simulated':>10} {'error':>7}")
    for (gpu, kind), rates in sorted(truth.items(), key=lambda item: list(NAMES).index(item[0][0])):
        try:
            said = predicted(gpu, kind)
        except AutosacError as e:
            print(gpu, kind, e)
            continue
        error = said / statistics.median(rates) - 1
        errors[kind].append(abs(error))
        between = f"{min(rates):.1f} to {max(rates):.1f}" if len(rates) > 1 else f"{rates[0]:.1f}"
        print(f"{gpu:16} {kind:9} {len(rates):4} {between:>18} {said:10.1f} {error:+7.1%}")
    for kind in TYPES:
        print(f"mean error in {kind}: {statistics.mean(errors[kind]):.1%} ({len(errors[kind])} GPUs)")


if __name__ == "__main__":
    main()
