"""The TorchTitan plugin. For TorchTitan 0.2, importing this module makes jobs obey their ``[autosac]`` section:

    [job]
    custom_config_module = "autosac.integrations.torchtitan.job_config"
    [experimental]
    custom_import = "autosac.integrations.torchtitan"
    [autosac]
    enable = true
    budget = "68GiB"

For TorchTitan 0.3 it has the checkpointing policy `AutoSAC`, for use in a config function:

    config.activation_checkpoint = AutoSAC.Config(budget="68GiB")

See `plugin` and `policy` for how.
"""

from __future__ import annotations

from autosac.titan.version import has_python_jobs

if has_python_jobs():
    from autosac.integrations.torchtitan.policy import AutoSAC as AutoSAC
else:
    from autosac.integrations.torchtitan.hook import transform as transform
    from autosac.integrations.torchtitan.plugin import install as install

    install()
