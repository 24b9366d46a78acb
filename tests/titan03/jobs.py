"""Config functions of the tests' jobs, as a TorchTitan 0.3 user would write them. On PYTHONPATH they are ``jobs:NAME``."""

from torchtitan.models.common.attention import ScaledDotProductAttention
from torchtitan.models.llama3.config_registry import llama3_debugmodel
from torchtitan.trainer import Trainer

from autosac.integrations.torchtitan import AutoSAC


def tiny() -> Trainer.Config:
    """Two layers of the debug model, with attention that the CPU can train, on what torch 2.13 can shard."""
    config = llama3_debugmodel()
    del config.model_spec.model.layers[2:]
    for layer in config.model_spec.model.layers:
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
    config.training.local_batch_size = 2
    config.training.seq_len = 64
    config.parallelism.spmd_backend = "partial_dtensor"
    config.metrics.log_freq = 1
    return config


def flexible() -> Trainer.Config:
    """Two layers of the debug model, with the flexible attention that TorchTitan gives it."""
    config = llama3_debugmodel()
    del config.model_spec.model.layers[2:]
    config.training.local_batch_size = 2
    config.training.seq_len = 128
    config.parallelism.spmd_backend = "partial_dtensor"
    return config


def planned() -> Trainer.Config:
    """The tiny job, checkpointed by a plan that is not there."""
    config = tiny()
    config.activation_checkpoint = AutoSAC.Config(plan="missing.json", preserve_rng_state=False)
    return config


def lean() -> Trainer.Config:
    """The tiny job, whose optimizer has states of two bytes."""
    config = tiny()
    config.optimizer.implementation = "fused_opt_states_bf16"
    return config


def no_model() -> object:
    """A configuration that nothing can be trained with."""
    config = tiny()
    config.model_spec = None
    return config
