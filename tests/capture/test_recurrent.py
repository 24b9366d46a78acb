"""Recurrent layers in captured steps."""

from __future__ import annotations

import torch

from autosac.capture.jobs.eager import EagerRequest, capture_eager


def test_the_step_of_a_job_has_one_call_of_cudnn() -> None:
    """An LSTM without batch first, 5 x 3 x 8 to width 16: output, states and reserve forward, one flat gradient backward."""

    def make_step(device: torch.device) -> object:
        model = torch.nn.LSTM(8, 16, device=device)
        x = torch.randn(5, 3, 8, device=device)

        def step() -> None:
            model(x)[0].sum().backward()

        return model, step

    trace = capture_eager(make_step, EagerRequest())
    names = [signature.name for signature in trace.signatures]
    assert not [name for name in names if "thnn" in name or name == "aten.mm.default"]
    signature = trace.signatures[names.index("aten._cudnn_rnn.default")]
    assert [meta.shape for meta in signature.outputs] == [(5, 3, 16), (1, 3, 16), (1, 3, 16), (4800,), (1664,)]
    gradients = [storage for storage in trace.storages if storage.op == "aten._cudnn_rnn_backward.default"]
    assert {storage.nbytes for storage in gradients} == {5 * 3 * 8 * 4, 3 * 16 * 4, 1664 * 4}
