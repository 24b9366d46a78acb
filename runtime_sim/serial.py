"""A CPU as the device: the host runs the operators itself, so host and device are one queue.

    t_i = device_i + host_i + what the host has paid since the operator before it

for every operator and collective i; what is left after the last one goes to the last one. Executed with a host that costs
nothing, such a trace takes the sum of both.
"""

from __future__ import annotations

from collections.abc import Collection

import numpy as np
from numpy.typing import NDArray

from autosac.runtime_sim.host import HostModel, host_costs
from autosac.trace import Collective, Op, Trace


def serial_costs(
    trace: Trace, event_ms: NDArray[np.float64], host: HostModel, selective_modules: Collection[str] = ()
) -> NDArray[np.float64]:
    """Milliseconds of every event when the host does all the work; see the module's docstring."""
    paid = host_costs(trace, host, selective_modules)
    times = np.zeros(len(trace.events))
    carried, last = 0.0, -1
    for i, event in enumerate(trace.events):
        carried += float(paid[i])
        runs = type(event) is Collective or (type(event) is Op and not trace.signatures[event.signature].is_view)
        if runs:
            times[i] = event_ms[i] + carried
            carried, last = 0.0, i
    if last >= 0:
        times[last] += carried
    return times
