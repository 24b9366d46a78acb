"""What scripts ask about numbers that nobody knows: is a loss small enough, a matrix regular, how often is a label there."""

from __future__ import annotations

import re
from typing import Any

import pytest

QUESTIONS = """
import torch
from torch.distributions import Categorical, MultivariateNormal

layer = torch.nn.Linear(8, 8).cuda()
unknown = layer(torch.randn(32, 8, device="cuda"))
labels = unknown.argmax(1)
print("counts:", torch.bincount(labels, minlength=8).shape, torch.bincount(labels, weights=unknown[:, 0]).dtype)
print("repeated:", torch.repeat_interleave(unknown, labels, dim=0).shape)
print("solved:", torch.linalg.lstsq(unknown, unknown[:, :3]).solution.shape)
print("agree:", torch.allclose(unknown, unknown * 2), torch.equal(unknown, unknown * 2), torch.equal(unknown, unknown[:4]))
print("known agree:", torch.equal(torch.zeros(2, device="cuda").long(), torch.ones(2, device="cuda").long()))
factor, info = torch.linalg.cholesky_ex(unknown @ unknown.T)
assert info.item() == 0
normal = MultivariateNormal(unknown.mean(0), unknown.T @ unknown)
choice = Categorical(unknown.softmax(-1))
order = torch.randperm(9, device="cuda", generator=torch.Generator("cuda")).tolist()
print("order:", sorted(order) == list(range(9)))
histogram = torch.histc(torch.tensor([0.1, 0.2, 0.9, 0.95], device="cuda"), bins=2, min=0, max=1)
print("histogram:", histogram.tolist())
losses = torch.nn.CTCLoss()(
    unknown[:, None].log_softmax(-1), torch.ones(1, 4, dtype=torch.long), torch.tensor([32]), torch.tensor([4])
)
"""
LOOP = """
import torch

torch.set_default_device("cuda")
layer = torch.nn.Linear(8, 8)
optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
loss, steps = torch.tensor(10.0), 0
while loss > 0.1:
    optimizer.zero_grad()
    loss = layer(torch.randn(16, 8)).square().mean()
    loss.backward()
    optimizer.step()
    steps += 1
    print("step", steps, loss.detach().cpu().numpy(), flush=True)
"""
OLD_TYPES = """
import torch

torch.set_default_tensor_type("torch.cuda.FloatTensor")
layer = torch.nn.Linear(8, 8)
far = torch.Tensor([1e10])
assert far.is_cuda and far.item() == 1e10 and torch.Tensor(2, 3).shape == (2, 3) and torch.Tensor().numel() == 0
optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
for _ in range(3):
    x = torch.rand(16, 8)
    layer(torch.cat([x[:, :7], far.expand(x[:, :1].shape)], -1)).sum().backward()
    optimizer.step()
torch.set_default_tensor_type(torch.FloatTensor)
assert not torch.Tensor([1.0]).is_cuda
"""
CURRICULUM = """
import time

import torch

layers = torch.nn.Sequential(*(torch.nn.Linear(512, 512, bias=False) for _ in range(4))).cuda()
for layer in layers[:3]:
    layer.requires_grad_(False)
optimizer = torch.optim.SGD(layers.parameters(), lr=0.1)
begin = time.time()
for step in range(5):
    if step == 2:
        layers.requires_grad_(True)
    layers(torch.randn(2**14 if step < 2 else 2**16, 512, device="cuda")).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    torch.cuda.synchronize()
    print(f"step {step + 1} ends at {time.time() - begin:.6f}")
"""


def test_unknown_numbers_answer_as_valid_ones_would(run: Any) -> None:
    """Counts have the size that the script gives, arguments are valid, factorisations succeed; what is known stays exact."""
    done = run(QUESTIONS + LOOP)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "counts: torch.Size([8]) torch.float32" in done.stdout
    assert "repeated: torch.Size([32, 8])" in done.stdout
    assert "solved: torch.Size([8, 3])" in done.stdout
    assert "agree: True True False" in done.stdout and "known agree: False" in done.stdout
    assert "order: True" in done.stdout and "histogram: [2.0, 2.0]" in done.stdout
    assert "assumed to be below its `minlength`" in done.stdout.replace("\n", " ")


def test_a_loop_ends_when_its_loss_would(run: Any) -> None:
    """A loss is compared as the number that the script would read: a loop until it is small goes on."""
    done = run(LOOP)
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.findall(r"^step (\d)", done.stdout, re.M) == ["1", "2", "3"]


def test_tensors_of_the_default_type_are_on_the_gpu(run: Any) -> None:
    """`torch.Tensor` follows `set_default_tensor_type`, there and back."""
    done = run(OLD_TYPES, "--steps", "0")
    assert done.returncode == 0, done.stdout + done.stderr


def test_steps_that_need_more_than_the_reported_one_are_named(run: Any) -> None:
    """Layers that thaw and batches that grow in the third step are said beside the report of the second."""
    done = run(CURRICULUM)
    assert done.returncode == 0, done.stdout + done.stderr
    notes = " ".join(done.stdout.split())
    assert re.search(r"steps differ: step 3 needs [\d.]+ [GM]iB of active memory, the reported step [\d.]+ MiB", notes)
    took = re.search(r"steps differ: step 3 takes ([\d.,]+) ms, the reported step ([\d.,]+) ms", notes)
    ends = [float(end) for end in re.findall(r"^step \d ends at (.*)", done.stdout, re.M)]
    assert took
    assert ends[2] - ends[1] == pytest.approx(float(took[1]) / 1e3, rel=0.02)  # the script's clock says so, too
    assert float(took[1]) > 4 * float(took[2])  # four times the rows, and gradients of all layers


PREFETCHED = """
import torch

layer = torch.nn.Linear(8, 8).cuda()
optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
aside = torch.cuda.Stream()
for step in range(20):
    with torch.cuda.stream(aside):
        x = torch.randn(16, 8).cuda(non_blocking=True)
    torch.cuda.current_stream().wait_stream(aside)
    layer(x).sum().backward()
    optimizer.step()
"""


def test_a_batch_copied_on_another_stream_is_no_warm_up(run: Any) -> None:
    """Only a forward on another stream warms up a graph: three steps run, and the second is reported."""
    done = run(PREFETCHED)
    assert "step 2 of the 3 that the script ran" in done.stdout, done.stdout + done.stderr


SIZES = """
import threading
import time

import torch

@torch.library.custom_op("detectors::keep", mutates_args=())
def keep(boxes: torch.Tensor) -> torch.Tensor:
    raise AssertionError("runs on values")

@keep.register_fake
def _(boxes):
    return boxes.new_empty(torch.library.get_ctx().new_dynamic_size(), dtype=torch.int64)

layer = torch.nn.Linear(4, 4).cuda()
optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
boxes = []
thread = threading.Thread(target=lambda: boxes.append(torch.rand(30, 4).cuda() + 1))
thread.start()
thread.join()
kept = keep(boxes[0])
print("kept:", kept.shape)
try:
    boxes[0].t().view(-1)
except RuntimeError as e:
    print(e)
try:
    torch.zeros(3).cuda(1)
except torch.AcceleratorError as e:
    print(e)
for _ in range(2):
    layer(torch.rand(30, 4, device="cuda")[kept]).sum().backward()
    optimizer.step()
while True:
    time.sleep(1)
"""


def test_what_is_not_known_and_what_does_not_end(run: Any) -> None:
    """Custom operators have their largest sizes, threads have the GPU, a GPU too many raises, kept steps are reported."""
    done = run(SIZES, "--steps", "0", "--patience", "4")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "kept: torch.Size([30])" in done.stdout
    assert "CUDA error: invalid device ordinal (cuda:1 of 1 GPU)" in done.stdout
    assert "view size is not compatible" in done.stdout
    notes = " ".join(done.stdout.split())
    assert "assumed to be as large as they can be" in notes
    assert "has taken no further step for 4 s" in notes
