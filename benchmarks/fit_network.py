"""Fits the efficiency of rings between nodes (`autosac.estimator.network.flows`): all_gather over nodes of eight H100s.

    python -m benchmarks.fit_network

Times are those of autoparallel's model (meta-pytorch/autoparallel, BSD-3, cost_models/nccl_cost_model.py): latency and
bandwidth by protocol from NCCL 2.27's tuning logs, multiplied by a ramp in the bytes of one rank that was fitted to nccl-tests
on 2 to 32 nodes. 2 to 16 nodes are fitted, 32 are held out. The parameters: steepness and midpoint of the curve, payload of
LL128.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import least_squares

from autosac.estimator import FlowModel, LogSigmoid, load_cluster, load_hardware
from autosac.estimator.nccl import latencies_us

# nodes: (microseconds, GB/s) of LL, LL128, Simple
TUNED = {
    2: ((23.3, 41.6), (44.6, 313.2), (70.0, 409.6)),
    4: ((42.7, 21.1), (79.2, 303.1), (145.6, 396.4)),
    8: ((81.5, 20.7), (148.4, 298.3), (296.8, 390.1)),
    16: ((159.1, 20.6), (286.8, 295.9), (599.2, 387.0)),
    32: ((314.3, 20.5), (563.6, 294.8), (1204.0, 385.5)),
}
# share of that bandwidth with 64, 128, 256, ... bytes a rank
RAMP = (0.01, 0.02, 0.03, 0.06, 0.10, 0.16, 0.25, 0.36, *(0.68,) * 10, 0.79, *(0.87,) * 5)
SIZES = tuple(2**i for i in range(17, 33))
_NODE_GBPS, _PAYLOAD_LL = 400.0, 0.05


def published_us(nodes: int, nbytes: int) -> float:
    """The time by the tables above."""
    step = math.log2(max(nbytes // (8 * nodes) // 64, 1))
    ramp = float(np.interp(step, range(len(RAMP)), RAMP))
    return min(latency + nbytes / (1e3 * gbps * ramp) for latency, gbps in TUNED[nodes])


def modelled_us(values: NDArray[np.float64], nodes: int, nbytes: int) -> float:
    """The flow model's ring with these parameters."""
    steepness, midpoint, payload = values
    ranks = 8 * nodes
    gbps = _NODE_GBPS / (1 + math.exp(-steepness * (math.log(nbytes / ranks + 1) - midpoint)))
    times = []
    for protocol, share in (("LL", _PAYLOAD_LL), ("LL128", payload), ("Simple", 1.0)):
        start, near, far = latencies_us("ring", protocol)
        moved = (ranks - 1) / ranks * nbytes / (1e3 * gbps * share)
        times.append(start + (ranks - nodes) * near + (nodes - 1) * far + moved)
    return min(times)


def main() -> None:
    """Fit, and print the errors of the fit and of the shipped models."""
    fitted = [(nodes, size) for nodes in (2, 4, 8, 16) for size in SIZES]

    def errors(values: NDArray[np.float64]) -> list[float]:
        return [math.log(modelled_us(values, *case) / published_us(*case)) for case in fitted]

    solution = least_squares(errors, [0.4, 11.0, 0.75], loss="soft_l1", f_scale=0.05)
    print("steepness {:.3f}, midpoint {:.2f}, payload of LL128 {:.2f}".format(*solution.x))
    hardware = load_hardware("h100-sxm-80gb")
    for name, model in (("flows", FlowModel(hardware)), ("fitted", LogSigmoid(hardware))):
        for what, counts in (("2 to 16 nodes", (2, 4, 8, 16)), ("32 nodes, held out", (32,))):
            wrong = [
                abs(model.estimate("all_gather", size, place).ms * 1e3 / published_us(nodes, size) - 1)
                for nodes in counts
                for place in [load_cluster("hgx-h100").sized(8 * nodes).place(range(8 * nodes))]
                for size in SIZES
            ]
            print(f"{name:8} {what:20} median {np.median(wrong):.1%}, worst {max(wrong):.1%}")


if __name__ == "__main__":
    main()
