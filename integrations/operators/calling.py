"""How a function is called, whatever its annotations name."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from typing import Any

# Annotations may name what is imported for type checkers only, and are evaluated when they are asked for (Python 3.14).
_AS_FAR_AS_KNOWN: dict[str, Any] = {}
if sys.version_info >= (3, 14):
    import annotationlib

    _AS_FAR_AS_KNOWN["annotation_format"] = annotationlib.Format.FORWARDREF


def signature_of(function: Callable[..., Any]) -> inspect.Signature:
    """As `inspect.signature`; names in annotations may be unknown. TypeError or ValueError if it does not tell."""
    return inspect.signature(function, **_AS_FAR_AS_KNOWN)
