"""``autosac cache``: where captures are kept, how many there are and how large, and how to remove them."""

from __future__ import annotations

import argparse
import json

from autosac.capture.process.store import LIMIT_BYTES, default_store
from autosac.errors import UsageError
from autosac.quantities import format_bytes


def cache(arguments: argparse.Namespace) -> None:
    """Run it. UsageError if there is no cache, OSError if a capture cannot be removed."""
    store = default_store()
    if store is None:
        raise UsageError(
            "nothing is cached: the environment variable AUTOSAC_CACHE is off; unset it to see or clear the cache"
        )
    folder, (count, nbytes) = store.folder, store.size()
    if arguments.clear:
        store.clear()
    if arguments.json:
        document = {"path": str(folder), "entries": count, "bytes": nbytes, "limit_bytes": LIMIT_BYTES}
        print(json.dumps({**document, "cleared": arguments.clear}, indent=1))
        return
    what = f"{count} {'capture' if count == 1 else 'captures'}, {format_bytes(nbytes)}"
    if arguments.clear:
        print(f"removed {what} from {folder}")
        return
    print(f"{folder}: {what} of at most {format_bytes(LIMIT_BYTES)}")
