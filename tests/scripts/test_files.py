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
LISTS = (
    """
import glob, os, pathlib, shutil
import torch
os.makedirs("run/1")
for name in ("a.pt", "b.pt"):
    torch.save({}, pathlib.Path("run", "1", name))
pathlib.Path("run/1/c.txt").touch()
print(sorted(os.listdir("run/1")), sorted(glob.glob("run/*/*.pt")), sorted(x.name for x in pathlib.Path("run").glob("*/b*")))
with os.scandir("run/1") as found:
    print(sorted((x.name, x.is_file(), x.is_dir(), x.is_symlink(), x.stat().st_size, os.fspath(x)) for x in found)[0])
shutil.rmtree("run")
print(os.path.exists("run/1/a.pt"))
"""
    + TRAINS
)
LIBRARIES = (
    """
import torch
import torch.distributed.checkpoint as dcp
from safetensors import safe_open
from safetensors.torch import load_file, load_model, save_file, save_model
class Counter:
    steps = 3
    def state_dict(self): return {"steps": self.steps, "moments": torch.zeros(4, device="cuda")}
    def load_state_dict(self, state): self.steps, self.moments = state["steps"], state["moments"]
net, counter = torch.nn.Linear(8, 4).cuda(), Counter()
save_file({"weight": net.weight}, "one.safetensors", {"format": "pt"})
save_model(net, "net.safetensors")
print(load_model(net, "net.safetensors"), load_file("one.safetensors", device="cuda:0")["weight"].device)
with safe_open("one.safetensors", framework="pt", device="cuda:0") as opened:
    part = opened.get_slice("weight")
    print(opened.keys(), opened.metadata(), opened.get_tensor("weight").device, end=" ")
    print(part.get_shape(), part.get_dtype(), tuple(part[:2].shape))
print(safe_open("other.safetensors", "pt"))
dcp.save({"net": net.state_dict(), "counter": counter, "rates": [0.5, 0.25]}, checkpoint_id="ck/1")
dcp.async_save({"counter": counter}, storage_writer=dcp.FileSystemWriter("ck/2")).result()
counter.steps, state = 9, {"net": net.state_dict(), "counter": counter, "rates": [0.0, 0.0], "new": 1}
dcp.load(state, storage_reader=dcp.FileSystemReader("ck/1"))
print(counter.steps, tuple(counter.moments.shape), state["rates"], state["new"], state["net"]["weight"].device)
counter.steps = 8
dcp.load({"counter": counter}, checkpoint_id="ck/2")
print(counter.steps)
"""
    + TRAINS
)
OPENED = """
def safe_open(filename, framework, device="cpu"): return f"{filename} on {device}"
"""
SAFETENSORS = """
import torch
_TYPES = {"F32": torch.float32}
def save_file(tensors, filename, metadata=None): raise AssertionError("is written")
def save_model(model, filename): raise AssertionError("is written")
def load_file(filename, device="cpu"): return {}
def load_model(model, filename): return tuple(model.load_state_dict(load_file(filename)))
"""
OF_RANKS = """
import io, os, pathlib, sys
import torch, torch.distributed as dist
dist.init_process_group("nccl")
rank = dist.get_rank()
model = torch.nn.Linear(8, 8).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(3):
    there = os.path.exists(f"run/{step}.pt")
    if there:
        sys.exit(f"rank {rank}: the folder is not new")
    dist.barrier()
    if rank == 0:
        state = torch.get_rng_state()[:3], torch.tensor(2.5, dtype=torch.bfloat16), torch.empty(0)
        torch.save({"model": model.state_dict(), "step": step, "state": state}, f"run/{step}.pt")
        buffer = io.BytesIO()
        torch.save({"step": step}, buffer)
        pathlib.Path("sent.pt").write_bytes(buffer.getvalue())  # as Lightning does
    dist.barrier()
    found = torch.load(f"run/{step}.pt", map_location=f"cuda:{rank}")
    assert torch.load("sent.pt") == {"step": step}
    model.load_state_dict(found["model"])
    assert [tensor.tolist() for tensor in found["state"][1:]] == [2.5, []] and found["state"][0].dtype is torch.uint8
    model(torch.ones(2, 8, device="cuda")).sum().backward()
    dist.all_reduce(model.weight.grad)
    optimizer.step()
    if rank == 0:
        print(found["step"], os.listdir("run"))
"""


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


def test_folders_list_checkpoints_that_are_not_written(run: Any) -> None:
    """Beside files that are there, as entries of files; a folder that is removed takes them with it."""
    ended = run(LISTS)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.splitlines()[:3] == [
        "['a.pt', 'b.pt', 'c.txt'] ['run/1/a.pt', 'run/1/b.pt'] ['b.pt']",
        "('a.pt', True, False, False, 0, 'run/1/a.pt')",
        "False",
    ]


def test_checkpoints_of_libraries_are_loaded_again(run: Any, tmp_path: Path) -> None:
    """Numbers are those that were saved, tensors are like them; what was not saved stays."""
    (tmp_path / "safetensors").mkdir()
    (tmp_path / "safetensors" / "__init__.py").write_text(OPENED)
    (tmp_path / "safetensors" / "torch.py").write_text(SAFETENSORS)
    ended = run(LIBRARIES)
    assert ended.returncode == 0, ended.stderr
    opened = "['weight'] {'format': 'pt'} cuda:0 [4, 8] F32 (2, 8)"
    lines = ["([], []) cuda:0", opened, "other.safetensors on cpu", "3 (4,) [0.5, 0.25] 1 cuda:0", "3"]
    assert ended.stdout.splitlines()[:5] == lines
    assert not (tmp_path / "ck").exists() and "checkpoints are not written" in ended.stdout


def test_ranks_load_what_one_of_them_has_saved(run: Any, tmp_path: Path) -> None:
    """At a barrier they wait for each other: none finds the file too early, or not yet."""
    (tmp_path / "run").mkdir()
    ended = run(OF_RANKS, "--nproc", "2")
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.splitlines()[:2] == ["0 ['0.pt']", "1 ['0.pt', '1.pt']"]
