"""Where files are kept from one run to the next: ``$XDG_CACHE_HOME/autosac`` (``~/.cache``), or ``$AUTOSAC_CACHE``."""

from __future__ import annotations

import os
from pathlib import Path

from autosac.errors import UsageError
from autosac.files.writing import check_folder


def cache_folder(name: str) -> Path | None:
    """The user's folder `name` for kept files, which need not exist; None if AUTOSAC_CACHE=off.

    UsageError if the variable is neither that nor a usable folder.
    """
    wanted = os.environ.get("AUTOSAC_CACHE", "").strip()
    if wanted.lower() in ("off", "0", "no", "false"):
        return None
    base = Path(os.environ.get("XDG_CACHE_HOME", ""))
    if not base.is_absolute():  # the standard says to ignore it then
        base = Path.home() / ".cache"
    folder = base / "autosac" / name
    if wanted and wanted.lower() not in ("on", "1", "yes", "true"):
        folder = Path(wanted).expanduser() / name
        if not folder.is_absolute():
            raise UsageError(
                f"the environment variable AUTOSAC_CACHE is {wanted!r}: expected off, on, or the absolute path of a folder"
            )
        try:
            check_folder(folder)
        except UsageError as e:
            raise UsageError(f"the environment variable AUTOSAC_CACHE is {wanted!r}: {e}") from e
    return folder
