"""What people write in training loops: lazy layers, inference in between, optimizers in the backward, workers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from autosac.trace import Op, Phase, Trace

LAZY = """
import torch
from torch import nn
model = nn.Sequential(nn.LazyConv2d(8, 3), nn.Flatten(), nn.LazyLinear(10)).to("cuda", torch.bfloat16)
model(torch.zeros(1, 3, 8, 8, device="cuda", dtype=torch.bfloat16))
print([(tuple(p.shape), p.dtype, p.device) for p in model.parameters()][2])
optimizer = torch.optim.AdamW(model.parameters())
scale = torch.linspace(0.1, 1, 4, device="cuda")

@torch.inference_mode()
def sample():
    x = torch.zeros(4, device="cuda")
    for _ in range(2):
        x = x * scale[1] - scale[1].sqrt()
    return x

while True:
    model(torch.zeros(2, 3, 8, 8, device="cuda", dtype=torch.bfloat16)).sum().backward()
    optimizer.step()
    print(tuple(sample().shape))
"""
IN_BACKWARD = """
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

layers = nn.ModuleList(nn.Sequential(nn.Linear(256, 256), nn.GELU(), nn.Linear(256, 256)) for _ in range(3)).cuda()
optimizers = {p: torch.optim.SGD([p], lr=0.1, foreach=False) for p in layers.parameters()}

def update(parameter):
    optimizers[parameter].step()
    optimizers[parameter].zero_grad()

for parameter in reversed(list(layers.parameters())):
    parameter.register_post_accumulate_grad_hook(update)
optimizers[layers[2][2].weight].step()  # it is the first one
for step in range(9):
    x = torch.randn(64, 256, device="cuda")
    for layer in layers:
        x = checkpoint(layer, x, use_reentrant=False)
    x.sum().backward()
    print("step", step)
"""
WORKERS = """
import torch

class Rows(torch.utils.data.Dataset):
    def __len__(self):
        return 100000

    def __getitem__(self, index):
        return torch.ones(4)

model = torch.nn.Linear(4, 4).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for x in torch.utils.data.DataLoader(Rows(), 8, num_workers=2, pin_memory=True, prefetch_factor=2):
    model(x.cuda(non_blocking=True)).sum().backward()
    optimizer.step()
"""


def test_lazy_layers_and_inference(run: Any) -> None:
    """Parameters without a shape get one where the model is; views made in inference mode can be made again."""
    ended = run(LAZY)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.splitlines()[:4] == [
        "((10, 288), torch.bfloat16, device(type='cuda', index=0))",
        *["(4,)"] * 3,
    ]


def test_an_optimizer_in_the_backward(run: Any, tmp_path: Path) -> None:
    """What is computed again after its update begins no step: the kept one is a forward and the whole backward after it."""
    ended = run(IN_BACKWARD, "--save-capture", "step.trace")
    assert ended.returncode == 0, ended.stderr
    assert "step 2 of the 3 that the script ran" in ended.stdout
    trace = Trace.load(tmp_path / "step.trace")
    operators = [event for event in trace.events if type(event) is Op]
    products = [event.phase for event in operators if trace.signatures[event.signature].name == "aten.addmm.default"]
    assert products == [Phase.FORWARD] * 6 + [Phase.RECOMPUTE] * 3


def test_workers_end_without_a_word(run: Any) -> None:
    """Processes that load data do not complain when the script has been stopped."""
    ended = run(WORKERS)
    assert (ended.returncode, ended.stderr) == (0, "")
