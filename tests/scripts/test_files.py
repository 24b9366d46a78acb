"""Files that scripts load, and those that they believe they have written."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

TRAINS = """
model = torch.nn.Linear(8, 8).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model(torch.ones(2, 8, device="cuda")).sum().backward()
optimizer.step()
"""
LOADS = (
    """
import torch
for where in ("cpu", "cuda", {"cpu": "cuda:0"}, lambda storage, _: storage, lambda storage, _: storage.cuda(0), None):
    found = torch.load("real.pt", map_location=where)
    weight, tied, labels = found["weight"], found["tied"], found["labels"]
    print(weight.device, labels.tolist(), weight.untyped_storage()._cdata == tied.untyped_storage()._cdata, tied.stride())
print(found["weight"].sum().item())
"""
    + TRAINS
)
SAVES = (
    """
import io, os, pathlib, shutil
import torch
weights = {"weight": torch.zeros(256, 256, device="cuda")}
weights["tied"] = weights["weight"].detach()
torch.save(weights, "new.tmp")
os.replace("new.tmp", "last.pt")
shutil.copy("last.pt", "best.pt")
print(os.path.exists("new.tmp"), os.path.getsize("last.pt"), pathlib.Path("best.pt").exists())
found = torch.load(pathlib.Path("best.pt"), map_location="cpu")
print(found["weight"].device, found["tied"] is found["weight"], torch.load("last.pt")["weight"].device)
os.remove("last.pt")
print(torch.load("last.pt")["step"])
buffer = io.BytesIO()
torch.save(weights, buffer)
print(tuple(torch.load(io.BytesIO(buffer.getvalue()))["weight"].shape))
pathlib.Path("sent.pt").write_bytes(buffer.getvalue())  # as Lightning does
with open("sent.pt", "rb") as file:
    print(torch.load(file)["tied"].device, torch.load("sent.pt")["tied"].device)
try:
    os.remove("new.tmp")
except FileNotFoundError as error:
    print("there is no", error.filename)
"""
    + TRAINS
)


def test_a_real_file_is_loaded(run: Any, tmp_path: Path) -> None:
    """What stays on the host has its values, what goes to the GPU those of small integers; shared memory stays shared."""
    weight = torch.ones(4, 5)
    torch.save({"weight": weight, "tied": weight.t(), "labels": torch.tensor([3, 1, 2])}, tmp_path / "real.pt")
    ended = run(LOADS)
    assert ended.returncode == 0, ended.stderr
    host, device = (f"{where} [3, 1, 2] True (1, 5)" for where in ("cpu", "cuda:0"))
    assert ended.stdout.splitlines()[:6] == [host, device, device, host, device, host]
    assert ended.stdout.splitlines()[6] == "20.0"


def test_a_checkpoint_that_is_not_written(run: Any, tmp_path: Path) -> None:
    """It can be renamed, copied, measured, loaded and removed; what was there before stays as it is."""
    torch.save({"step": 7}, tmp_path / "last.pt")
    ended = run(SAVES)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.splitlines()[:6] == [
        f"False {256 * 256 * 4} True",
        "cpu True cuda:0",
        "7",
        "(256, 256)",
        "cuda:0 cuda:0",
        "there is no new.tmp",
    ]
    assert sorted(path.name for path in tmp_path.glob("*.*")) == ["last.pt", "sent.pt", "train.py"]
