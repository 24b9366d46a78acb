"""Execution traces of MLCommons' Chakra: a simulated step written for other simulators, and read back.

`write_chakra` writes one file a rank, as ASTRA-sim takes them; `read_chakra` and `replay` execute such files here. The schema
is in `schema`. Needs the library protobuf (``pip install autosac[chakra]``).
"""

from __future__ import annotations

from autosac.chakra.export import Exported, write_chakra
from autosac.chakra.read import ChakraTrace, Graph, read_chakra
from autosac.chakra.replay import Replayed, replay

__all__ = ["ChakraTrace", "Exported", "Graph", "Replayed", "read_chakra", "replay", "write_chakra"]
