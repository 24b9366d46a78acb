"""The network as flows: what a group's messages load of a cluster's links, collisions of their paths, and stragglers."""
