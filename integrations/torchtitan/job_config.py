"""The ``[autosac]`` section of a TorchTitan job file, through ``job.custom_config_module``.

TorchTitan merges the `JobConfig` below into its own. It looks at the fields' types at run time, so
annotations must not be postponed in this module.
"""

from dataclasses import dataclass, field


@dataclass
class AutoSAC:
    """Selective activation checkpointing by AutoSAC, in place of TorchTitan's own."""

    enable: bool = False
    """Plan (or load a plan) before the model is parallelized, and apply it.

    Overrides activation_checkpoint.mode.
    """

    budget: str = ""
    """Memory a GPU may reserve: "68GiB", "70GB", or a share of the GPU such as "85%" (which is the default).
    """

    plan: str = ""
    """A plan file, written by `autosac plan`, to apply instead of planning; beside the job file, or in the working folder.

    Not together with budget.
    """

    solver: str = "pareto"
    """What decides operator by operator: "pareto", "ilp", "greedy" or "knapsack"."""

    curve: str = "staircase"
    """How the MILP models a module's trade-off of time against memory: "staircase" or "pwlf" (an upper bound)."""

    confidence: float = 0.0
    """Probability that the plan fits, such as 0.99; 0: no margin for prediction errors."""

    offload: bool = False
    """Allow offloading activations to host memory where that makes the step shorter."""

    chunk_loss: bool = False
    """Allow computing the loss in chunks of rows where that makes the step shorter. Its sum is then in another order."""

    gpu: str = ""
    """The GPU to plan for, as `autosac plan --gpu` takes it. Empty: the one that the job runs on."""

    observe: bool = False
    """Measure the first steps, compare them with the plan's prediction, and write autosac_run.json into the dump folder."""

    observe_steps: int = 3
    """How many steps are measured, after two that are not."""

    replan: bool = False
    """After the measured steps, plan again with what they say; change to the new plan if the budget is missed or the step
    would be shorter by more than 2 %. Implies observe.
    """


@dataclass
class JobConfig:
    """What is added to TorchTitan's JobConfig."""

    autosac: AutoSAC = field(default_factory=AutoSAC)
