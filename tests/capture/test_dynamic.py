"""Operators whose shapes depend on data, that draw numbers, or for which PyTorch has no shapes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from autosac.capture.device.dynamic import dynamic
from autosac.capture.jobs.eager import EagerRequest, capture_eager
from autosac.errors import CaptureError
from autosac.trace import Trace


def run(body: Callable[[torch.Tensor], torch.Tensor]) -> Trace:
    """A captured step: forward and backward of `body`, of 6 x 4 unknown numbers. What `body` asserts, holds there."""

    def make_step(device: torch.device) -> Any:
        x = torch.empty(6, 4, device=device).normal_().requires_grad_()
        return lambda: body(x).sum().backward()

    return capture_eager(make_step, EagerRequest())


def test_unknown_masks_select_everything() -> None:
    """So that memory is an upper bound: indexing, `masked_select`, `where` and `unique` of numbers that nobody knows."""

    def body(x: torch.Tensor) -> torch.Tensor:
        assert x[x > 0].shape == (24,)
        assert x[x[:, 0] > 0].shape == (6, 4)
        assert torch.where(x > 0)[1].tolist() == [0, 1, 2, 3] * 6
        assert torch.unique(x.detach()).shape == (24,)
        assert torch.unique(x.detach(), dim=0).shape == (6, 4)
        assert x.masked_select(torch.tensor([True, False, True, True], device=x.device)).shape == (18,)
        return x[x > 0]

    trace = run(body)
    assert "aten.nonzero.default" in [signature.name for signature in trace.signatures]
    assert [note.split(":")[0] for note in trace.info.notes] == [
        "masks that depend on activations are assumed to select everything",
        "numbers whose repetitions are dropped (unique) are assumed to be all different",
    ]


def test_a_mask_between_compiled_graphs() -> None:
    """Dynamo compiles nothing of the simulated device, which runs between two graphs: a selection is as in eager code."""

    def selected(x: torch.Tensor) -> torch.Tensor:
        return (x * 2)[x > 0] * 3

    eager, compiled = run(selected), run(torch.compile(selected))
    for trace in (eager, compiled):
        names = [signature.name for signature in trace.signatures]
        assert {"aten.nonzero.default", "aten.index.Tensor"} <= set(names)
    assert (
        eager.info.notes
        == compiled.info.notes
        == ("masks that depend on activations are assumed to select everything",)
    )


def test_one_operand_decides() -> None:
    """True or unknown is true, unknown and false is false, in place too; what is not decided stays unknown."""

    def body(x: torch.Tensor) -> torch.Tensor:
        unknown, yes = x[:, 0] > 0, torch.full((6,), True, device=x.device)
        unfinished = torch.ones(6, dtype=torch.long, device=x.device) & ~(unknown | yes)
        assert unfinished.max().item() == 0
        unknown &= ~yes
        assert unknown.tolist() == [False] * 6
        mixed = torch.tensor([True, False] * 3, device=x.device)
        assert (mixed | (x[:, 0] > 0)).nonzero().shape[0] == 6  # as of an unknown mask
        return x

    assert len(run(body).info.notes) == 1


def test_numbers_that_a_step_draws_are_known() -> None:
    """As many rows of a random mask are true as are kept; the order of random numbers is a permutation."""

    def body(x: torch.Tensor) -> torch.Tensor:
        mask = torch.rand(1000, device=x.device) < 0.25
        assert 200 < mask.nonzero().shape[0] < 300
        assert sorted(torch.rand(50, device=x.device).argsort().tolist()) == list(range(50))
        classes = torch.randint(3, 9, (500,), device=x.device)
        assert torch.unique(classes).tolist() == [3, 4, 5, 6, 7, 8]
        assert torch.bincount(classes).shape == (9,)
        noise = torch.randn(100, device=x.device)
        noise[:50] = 1.0
        assert (noise[:50] > 0.5).nonzero().shape[0] == 50
        noise.mul_(x.sum())
        assert (noise > 0).nonzero().shape[0] == 100  # unknown from here on
        assert not bool(torch.rand(1, device=x.device) < 1.0)  # a single one decides nothing
        return x

    run(body)


def test_drawing_leaves_the_host_alone() -> None:
    """Random numbers on the host are the same, whether or not the device draws some."""

    def body(x: torch.Tensor) -> torch.Tensor:
        torch.manual_seed(3)
        expected = torch.rand(2).tolist()
        torch.manual_seed(3)
        torch.rand(10, device=x.device)
        assert torch.rand(2).tolist() == expected
        return x

    run(body)


def test_lengths_from_the_host_give_shapes() -> None:
    """Packed sequences hold the rows that the lengths leave; CTC's alpha has two states for each target and one more."""

    def body(x: torch.Tensor) -> torch.Tensor:
        rows = nn.utils.rnn.pack_padded_sequence(x.view(2, 3, 4), torch.tensor([3, 1]), batch_first=True)
        assert rows.data.shape == (4, 4) and rows.batch_sizes.tolist() == [2, 1, 1]
        targets = torch.ones(2, 2, dtype=torch.long, device=x.device)
        log_probs = x.view(3, 2, 4).log_softmax(-1)
        lengths = torch.tensor([3, 3], device=x.device), torch.tensor([2, 1])
        return rows.data.sum() + F.ctc_loss(log_probs, targets, *lengths)

    trace = run(body)
    ctc = next(s for s in trace.signatures if s.name == "aten._ctc_loss.default")
    assert [output.shape for output in ctc.outputs] == [(2,), (2, 3, 5)]


def test_a_batch_without_sequences_has_one_state() -> None:
    """CTC's alpha has one state more than twice the longest target, which is as long as nothing if there is none."""
    log_probs, targets = torch.zeros(3, 0, 4, device="meta"), torch.zeros(0, 2, dtype=torch.long, device="meta")
    losses, alpha = dynamic(torch.ops.aten._ctc_loss.default, (log_probs, targets, [], []), {})
    assert (losses.shape, alpha.shape) == ((0,), (0, 3, 1))


def test_arguments_of_distributions_are_valid() -> None:
    """Checks with `all` hold."""

    def body(x: torch.Tensor) -> torch.Tensor:
        choice = torch.distributions.Categorical(logits=x)
        gamma = torch.distributions.Gamma(x.exp(), x.exp()).rsample()
        return choice.log_prob(choice.sample()).sum() + gamma

    run(body)


def test_operators_without_shapes_get_them() -> None:
    """CUDA's GRU cells keep 5 numbers for each hidden one, and their backward gives 3 for each gate's gradient."""

    def body(x: torch.Tensor) -> torch.Tensor:
        cell = nn.GRUCell(4, 8, device=x.device)
        return cell(x).logcumsumexp(0).cummax(0)[0]

    signatures = {signature.name: signature for signature in run(body).signatures}
    forward = signatures["aten._thnn_fused_gru_cell.default"]
    assert [output.shape for output in forward.outputs] == [(6, 8), (6, 40)]
    backward = signatures["aten._thnn_fused_gru_cell_backward.default"]
    assert [output.shape for output in backward.outputs] == [(6, 24), (6, 24), (6, 8), (24,), (24,)]


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (
            lambda x: torch.ops.aten.unique_dim_consecutive(x.detach(), 0)[0],
            "depends on values of simulated tensors, which are not known",
        ),
        (lambda x: torch.sparse.mm(torch.eye(6, device=x.device).to_sparse(), x), "sparse tensors cannot be simulated"),
        (lambda x: torch.nested.nested_tensor([x], layout=torch.strided), "nested tensors .* cannot be simulated"),
        (lambda x: torch.histogram(x, 3)[0], "PyTorch does not know the shapes of aten::histogram"),
    ],
)
def test_what_cannot_be_simulated_says_so(body: Any, message: str) -> None:
    """In one line, and with a remedy."""
    with pytest.raises(CaptureError, match=message):
        run(body)
