"""What a compiled graph writes to the class of a unit, and reads from it.

A unit has a subclass of its class, which reads what is set on its class and sets there what is set on it (`units`). Dynamo
does not know that: what a graph writes to one of the two it does not read from the other. A counter of the class that the
model counts and reads in one graph would be an old one. So the graph ends before such a write; Python writes then.
"""

from __future__ import annotations

import contextlib
from typing import Any

from autosac.integrations.recompute.units import is_class_of_units
from autosac.integrations.replacing import replace_once


def watch() -> None:
    """From now on, in this process. To be called when Dynamo meets a unit: its graph must not have written so far, either."""
    from torch._dynamo.side_effects import SideEffects
    from torch._dynamo.symbolic_convert import InstructionTranslator

    replace_once(SideEffects, "store_attr", _store_attr)
    with contextlib.suppress(AttributeError):  # Dynamo has ended the graph, and Python runs the unit
        for item in InstructionTranslator.current_tx().output.side_effects.store_attr_mutations:
            _end_graph_for(item)


def _store_attr(original: Any, effects: Any, item: Any, *args: Any, **kwargs: Any) -> Any:
    _end_graph_for(item)
    return original(effects, item, *args, **kwargs)


def _end_graph_for(item: Any) -> None:
    from torch._dynamo.exc import Unsupported

    written = getattr(item, "value", None)
    if isinstance(written, type) and is_class_of_units(written):
        raise Unsupported(
            f"an attribute of the class {written.__name__} is set, of which a module is under an AutoSAC plan: the compiler "
            "does not know that the module's own class shares it"
        )
