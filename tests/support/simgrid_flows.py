"""Runs flows in SimGrid: ``python simgrid_flows.py`` with [{"links": {name: GB/s}, "flows": [...]}, ...] on standard input.

A flow is {"links": [names], "gb": size, "start": seconds}. Prints the seconds at which each flow has ended, as JSON. A process
holds one simulation, so that every network runs in a child. The fluid model is the plain one: no slow start, no losses.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

_PLAIN = ("network/model:CM02", "network/crosstraffic:0", "network/TCP-gamma:0", "network/weight-S:0")
_LATENCY_S = 1e-9  # the same for all: SimGrid shares links by latency


def simulate(network: dict[str, Any]) -> list[float]:
    """The end of each flow, in seconds."""
    from simgrid import Actor, Comm, Engine, LinkInRoute, NetZone, this_actor

    engine = Engine(["flows", *(f"--cfg={setting}" for setting in _PLAIN), "--log=root.thres:error"])
    root = getattr(engine, "netzone_root", None)
    zone = root.add_netzone_full("zone") if hasattr(root, "add_netzone_full") else NetZone.create_full_zone("zone")
    new_link = getattr(zone, "add_link", None) or zone.create_link
    new_host = getattr(zone, "add_host", None) or zone.create_host

    def link(name: str, bandwidth: float, latency: float) -> Any:
        return new_link(name, bandwidth).set_latency(latency).seal()

    links = {name: link(name, gbps * 1e9, 0.0) for name, gbps in network["links"].items()}
    ends = [0.0] * len(network["flows"])
    hosts = []
    for i, flow in enumerate(network["flows"]):
        source, target = new_host(f"s{i}", 1e9), new_host(f"t{i}", 1e9)
        route = [
            LinkInRoute(link(f"latency{i}", 1e18, _LATENCY_S)),
            *(LinkInRoute(links[name]) for name in flow["links"]),
        ]
        if hasattr(zone, "add_netzone_full"):  # from SimGrid 4 on
            zone.add_route(source, target, route, False)
        else:
            zone.add_route(source.netpoint, target.netpoint, None, None, route, False)
        hosts.append((source, target))
    zone.seal()

    def send(number: int) -> None:
        this_actor.sleep_for(network["flows"][number]["start"])
        Comm.sendto(*hosts[number], int(network["flows"][number]["gb"] * 1e9))
        ends[number] = engine.clock

    for i, (source, _) in enumerate(hosts):
        source.add_actor(f"a{i}", send, i) if hasattr(source, "add_actor") else Actor.create(f"a{i}", source, send, i)
    engine.run()
    return ends


def main() -> None:
    """Simulate every network in a child of its own."""
    results = []
    for network in json.load(sys.stdin):
        reading, writing = os.pipe()
        child = os.fork()
        if not child:
            with os.fdopen(writing, "w") as pipe:
                json.dump(simulate(network), pipe)
            os._exit(0)
        os.close(writing)
        with os.fdopen(reading) as pipe:
            results.append(json.load(pipe))
        os.waitpid(child, 0)
    json.dump(results, sys.stdout)


if __name__ == "__main__":
    main()
