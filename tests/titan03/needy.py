"""A job whose package is not installed."""

import no_such_package  # type: ignore[import-not-found]  # noqa: F401
