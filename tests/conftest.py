"""For all tests: captures are made, not taken from what the user's earlier runs have left."""

from __future__ import annotations

import os

os.environ["AUTOSAC_CACHE"] = "off"
