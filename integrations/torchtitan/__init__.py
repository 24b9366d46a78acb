"""The TorchTitan plugin: importing this module makes TorchTitan jobs obey their ``[autosac]`` section.

    [job]
    custom_config_module = "autosac.integrations.torchtitan.job_config"
    [experimental]
    custom_import = "autosac.integrations.torchtitan"
    [autosac]
    enable = true
    budget = "68GiB"

Works with torchtitan 0.2.2 and all of its models. See `plugin` for how.
"""

from __future__ import annotations

from autosac.integrations.torchtitan.plugin import install, transform

__all__ = ["install", "transform"]

install()
