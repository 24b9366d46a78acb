"""What is said of errors in a captured step: in one line, with their causes."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch._dynamo.exc import BackendCompilerFailed
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from autosac.capture.failures import capture_error
from autosac.errors import PlanError

Capture = Callable[..., Any]


class Refusal(torch.autograd.Function):
    """Its backward fails."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        raise ValueError("no gradient from here")


@pytest.mark.parametrize("where", ["hook", "function"])
def test_errors_in_a_backward_are_told(capture: Capture, where: str) -> None:
    """An error raised in the autograd engine passes its stream guards, which ask a Python backend for its type."""

    def make_step(device: torch.device) -> Any:
        def refuse(_: torch.Tensor) -> None:
            raise ValueError("no gradient from here")

        def step() -> None:
            x = torch.ones(4, device=device, requires_grad=True)
            y = x * 2 if where == "hook" else Refusal.apply(x)
            if where == "hook":
                y.register_hook(refuse)
            y.sum().backward()

        return step

    with pytest.raises(Exception, match=r"training step 1: ValueError: no gradient from here"):
        capture(make_step)


def test_what_a_compiler_wraps_is_told_as_it_is() -> None:
    """A plan's refusal that is raised while a unit is compiled comes without the compiler's own words, and torch.fx's."""
    why = "layers.0 is compiled, and plans of compiled modules need PyTorch 2.12 or newer"
    refusal = PlanError(f"{why}\n\nWhile executing %tag_activation_checkpoint")
    told = capture_error(BackendCompilerFailed(lambda: None, refusal, None), "training step 1")
    assert (type(told), str(told)) == (PlanError, why)


def test_causes_are_told() -> None:
    """An error that another one has caused comes with it, each on one line of limited length."""
    try:
        try:
            raise ValueError("no\nsuch shape")
        except ValueError as e:
            raise RuntimeError("stage 3 failed " + "x" * 300) from e
    except RuntimeError as e:
        told = str(capture_error(e, "training step 1"))
    assert told.startswith("training step 1: RuntimeError: stage 3 failed xxx")
    assert "..., because of ValueError: no such shape (at " in told and len(told) < 400


def test_an_error_without_a_message_is_placed() -> None:
    """The function that raised it is named."""
    try:
        raise AssertionError
    except AssertionError as e:
        told = str(capture_error(e, "training step 1"))
    assert told.startswith(
        "training step 1: AssertionError in test_an_error_without_a_message_is_placed (capture/test_failures.py:"
    )


def test_an_error_without_a_message_may_have_a_remedy() -> None:
    """It is known by the function that raised it: context parallelism refuses tensor parallelism's tensors so."""

    def sdpa_input_fn() -> None:
        raise AssertionError

    with pytest.raises(AssertionError) as raised:
        sdpa_input_fn()
    assert "make tensor_parallel_degree or context_parallel_degree 1" in str(capture_error(raised.value, "step"))


def test_what_this_torch_cannot_compile_is_told() -> None:
    """The assertion of torch 2.13 becomes one line: which torch it is, which can train the job, and what else helps."""
    error = AssertionError("expected all tensors_saved_with_vc_check to be Tensors")
    told = str(capture_error(error, "training step 1"))
    assert told.startswith(f"training step 1: this torch ({torch.__version__}) cannot train the job")
    assert "use torch 2.11 or 2.14.1" in told and "\n" not in told


def test_memory_budgets_under_tensor_parallelism() -> None:
    """The partitioner of torch 2.13 asks how large a mesh is; the line says that the real job fails, too, and what helps."""
    error = RuntimeError(
        "Cannot compute the size of FakeScriptObject on node primals_2. Set "
        "torch._functorch.config.unsafe_treat_script_objects_as_zero_size = True to assume such objects are zero size."
    )
    told = str(capture_error(error, "training step 1"))
    assert told.startswith(
        f"training step 1: this torch ({torch.__version__}) cannot train the job: its partitioner takes no"
    )
    assert "use a plan of AutoSAC, or set" in told and "\n" not in told


def test_other_operators_in_a_recomputation_than_in_the_forward() -> None:
    """PyTorch's own selective checkpointing refuses them; the line says that the real job fails, too, and what does not."""
    error = RuntimeError(
        "aten.split.default invocation index 3 encountered during backward but not found in storage. This"
    )
    told = str(capture_error(error, "training step 1"))
    assert told.startswith(f"training step 1: this torch ({torch.__version__}) cannot train the job: in a module that")
    assert "or use a plan of AutoSAC" in told and "\n" not in told


def test_results_of_other_operators_in_a_recomputation() -> None:
    """Where a recomputation runs fewer operators of a kind than the forward, PyTorch gives one what it saved of another: the
    error that the wrong result causes is told as what it is. One that the forward raises is not.
    """
    copy = torch.ops.aten._to_copy.default

    def policy(_: Any, operator: Any, *__: Any, **settings: Any) -> CheckpointPolicy:
        whole = operator is copy and settings.get("dtype") is torch.int64
        return CheckpointPolicy.MUST_SAVE if whole else CheckpointPolicy.PREFER_RECOMPUTE

    runs: list[None] = []

    def forward(x: torch.Tensor) -> torch.Tensor:
        runs.append(None)
        if len(runs) == 1:
            x.detach().to(torch.int64)
        return x.to(torch.float64).sin()

    contexts = partial(create_selective_checkpoint_contexts, policy)
    x = torch.ones(2, requires_grad=True)
    with pytest.raises(RuntimeError, match="not support dtype: Long") as raised:
        checkpoint(forward, x, use_reentrant=False, context_fn=contexts).sum().backward()
    told = str(capture_error(raised.value, "training step 1"))
    assert told.startswith(f"training step 1: this torch ({torch.__version__}) cannot train the job: in a module that")
    assert "or use a plan of AutoSAC" in told and "\n" not in told

    with pytest.raises(RuntimeError) as raised:
        checkpoint(lambda x: x @ torch.ones(3), x, use_reentrant=False, context_fn=contexts)
    assert "selectively" not in str(capture_error(raised.value, "training step 1"))


def test_schedules_that_keep_the_graphs_of_compiled_code() -> None:
    """PyTorch refuses them; the line says that the real job fails, too, and which schedules do not."""
    error = RuntimeError(
        "This backward function was compiled with non-empty donated buffers which requires create_graph=False and"
    )
    told = str(capture_error(error, "training step 1"))
    assert told.startswith(
        "training step 1: a compiled backward reuses the memory of what it has saved (donated buffers)"
    )
    assert "in the real job too; take a schedule such as 1F1B or Interleaved1F1B" in told and "\n" not in told


def test_branches_that_depend_on_values(capture: Capture) -> None:
    """What `torch.cond` would choose by is not known in a capture; the line says what to do."""

    def make_step(device: torch.device) -> Any:
        x = torch.ones(4, device=device, requires_grad=True)

        def step() -> None:
            torch.cond(x.sum() > 0, torch.sin, torch.cos, (x,)).sum().backward()

        return step

    with pytest.raises(Exception, match=r"torch\.cond chooses a branch by the value of a simulated tensor"):
        capture(make_step)


def test_an_error_reads_the_same_in_every_process() -> None:
    """Addresses of objects are left out: two refusals for one reason are known to be alike."""
    one, other = object(), object()
    told = {str(capture_error(KeyError(each), "training step 1")).partition(" (at")[0] for each in (one, other)}
    assert told == {"training step 1: KeyError: <object object>"}
    assert "read at 0x1f" in str(capture_error(ValueError("read at 0x1f"), "training step 1"))
