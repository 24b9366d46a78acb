"""Pictures with names that strangers chose: matplotlib draws them as they are written."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator

from autosac.errors import UsageError


@contextlib.contextmanager
def literal_text() -> Iterator[None]:
    """While a figure is made and saved: ``$`` begins no formula, and characters that the font lacks are drawn as boxes."""
    try:
        import matplotlib
    except ImportError:
        raise UsageError("PNG pictures need matplotlib: pip install 'autosac[pictures]'") from None
    with matplotlib.rc_context({"text.parse_math": False}), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing from font")
        yield
