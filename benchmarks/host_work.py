"""How fast one core goes through tensors: what CPU offload costs the host (`HostModel.host_gb_us`).

Prints, for operators of an offloaded optimizer's step, the GB of their inputs that one thread reads in a second. Times are
thread times, so that they hardly depend on what else runs.
"""

from __future__ import annotations

import argparse
import functools
import sys
import time
from collections.abc import Callable, Iterator

import torch

from benchmarks.ending import exit_code

_REPEATS = 3


def _operators(numbers: int) -> Iterator[tuple[str, int, Callable[[], object]]]:
    """Name, bytes of the inputs, and a call."""
    parameter, gradient, mean, square = (torch.rand(numbers) for _ in range(4))
    step, factor = torch.tensor(1.0), torch.tensor(0.5)
    update = functools.partial(
        torch._fused_adamw_,
        *([parameter], [gradient], [mean], [square], [], [step]),
        lr=1e-4,
        beta1=0.9,
        beta2=0.95,
        weight_decay=0.1,
        eps=1e-8,
        amsgrad=False,
        maximize=False,
    )
    yield "fused AdamW", 16 * numbers, update
    yield "norm of gradients", 4 * numbers, lambda: torch._foreach_norm([gradient])
    yield "clipping of gradients", 4 * numbers, lambda: torch._foreach_mul_([gradient], factor)


def _seconds(call: Callable[[], object]) -> float:
    call()
    begin = time.thread_time()
    for _ in range(_REPEATS):
        call()
    return (time.thread_time() - begin) / _REPEATS


def run(numbers: int) -> int:
    """Print the rates."""
    torch.set_num_threads(1)
    for name, nbytes, call in _operators(numbers):
        print(f"{name:22} {nbytes / _seconds(call) / 1e9:6.1f} GB/s")
    return 0


def main() -> int:
    """Parse the arguments, run, and turn errors into a message and an exit code."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.host_work", description=__doc__)
    parser.add_argument("--numbers", type=int, default=40_000_000, help="elements of each tensor (default 40,000,000)")
    return exit_code(lambda: run(parser.parse_args().numbers))


if __name__ == "__main__":
    sys.exit(main())
