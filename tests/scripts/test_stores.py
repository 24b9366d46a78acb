"""Stores of `torch.distributed` in scripts: shared by the ranks that run, filled in for those that do not."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from autosac.capture.patches.stores import ScriptStore
from autosac.scripts import waits
from autosac.scripts.shelf import SharedShelf

WORLD_SIZE = 4

TELLS = """
import time
import torch
import torch.distributed as dist

dist.init_process_group("nccl")
rank, world_size = dist.get_rank(), dist.get_world_size()
store = dist.distributed_c10d._get_default_store()
if rank == 0:
    store.set("steps", "2")
steps = int(store.get("steps"))
store.add("ready", 1)
while int(store.add("ready", 0)) < world_size:
    time.sleep(0.01)
store.set(f"host/{rank}", f"node{rank}")
hosts = {store.get(f"host/{rank}").decode() for rank in range(world_size)}
own = dist.TCPStore("localhost", 12345, world_size, rank == 0)
if own.add("arrived", 1) == world_size:
    own.set("all", "here")
own.wait(["all"])
own.set(f"mine/{rank}", "")  # what others wait for stays
print(steps, hosts, own.delete_key(f"mine/{rank}"), flush=True)
model = torch.nn.Linear(8, 8, device="cuda")
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for step in range(steps):
    loss = model(torch.randn(4, 8, device="cuda")).sum()
    loss.backward()
    optimizer.step()
    if rank == 0:
        store.set(f"stop{step}", str(int(loss.item() < 0)))
    if store.get(f"stop{step}") == b"1":
        break
"""
LATE = """
import time
import torch
import torch.distributed as dist

dist.init_process_group("nccl")
rank, world_size = dist.get_rank(), dist.get_world_size()
store = dist.distributed_c10d._get_default_store()
if rank == world_size - 1:
    sum(torch.randn(500, 500).inverse().sum() for _ in range(20))  # the others are there before
store.set(f"host/{rank}", f"node{rank}")
print(sorted(store.get(f"host/{other}").decode() for other in range(world_size)), flush=True)
model = torch.nn.Linear(8, 8, device="cuda")
optimizer = torch.optim.SGD(model.parameters(), 0.1)
model(torch.randn(4, 8, device="cuda")).sum().backward()
optimizer.step()
"""


def store(folder: Path, rank: int, shown: int = 0) -> ScriptStore:
    """A rank's store, in a job of four ranks."""
    (folder / f"rank-{rank}").mkdir(exist_ok=True)
    return ScriptStore(SharedShelf(folder, rank, shown), "", "", rank, WORLD_SIZE)


@pytest.mark.usefixtures("warm")
def test_rank_0_tells_the_others_by_the_store(autosac: Any, command: Any) -> None:
    """The last rank, which is tried as well, hears of it, and is like rank 0; counters count all ranks."""
    run = autosac(*command(TELLS, "--nproc", "4"))
    assert run.returncode == 0, run.stdout + run.stderr
    first, _, _ = run.stdout.partition("\n")
    assert first in ("2 {'node0', 'node3'} True", "2 {'node3', 'node0'} True")
    assert "of 4 ranks, 0, 3 ran" in run.stdout + run.stderr


@pytest.mark.usefixtures("warm")
def test_what_a_rank_that_runs_sets_later_is_waited_for(autosac: Any, command: Any) -> None:
    """The last rank runs and is slow: rank 0 gets its value, not one made of its own."""
    run = autosac(*command(LATE, "--nproc", "4"))
    assert run.returncode == 0, run.stdout + run.stderr
    assert run.stdout.startswith("['node0', 'node0', 'node0', 'node3']\n")


def test_what_one_rank_sets_others_get(tmp_path: Path) -> None:
    """Also one that has been waiting for it, through a store with a prefix and after it was set again."""
    first, last = store(tmp_path, 0), store(tmp_path, 3).prefixed("a").prefixed("b")
    found: list[bytes] = []
    waiting = threading.Thread(target=lambda: found.append(last.get("key")))
    waiting.start()
    first.set("a/b/key", "old")
    waiting.join()
    first.set("a/b/key", b"")
    assert found == [b"old"]
    assert last.get("key") == b""
    assert last.list_keys() == ["key"]
    assert first.list_keys() == ["a/b/key"]
    assert not list(tmp_path.glob("waits-*"))


def test_who_waits_for_what_nobody_sets_gets_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As soon as all others wait, too, or have ended. The message is PyTorch's, and says why."""
    monkeypatch.setattr(waits, "PATIENCE_S", 0.05)
    first = store(tmp_path, 0)
    store(tmp_path, 2)
    store(tmp_path, 3)
    (tmp_path / "ended-2").touch()
    waits.marker(tmp_path, 3).touch()
    with pytest.raises(
        dist.DistStoreError, match=r"wait timeout after 300000ms, keys: /key \(no rank that autosac ran"
    ):
        first.wait(["key"])


def test_counters_count_all_ranks(tmp_path: Path) -> None:
    """Each amount comes from every rank; a number that was set is begun with."""
    first = store(tmp_path, 0)
    assert [first.add("n", 1), first.add("n", 0), first.add("n", 2)] == [4, 4, 12]
    first.set("n", "5")
    assert first.add("n", 1) == 9
    assert first.get("n") == b"9"
    assert store(tmp_path, 3).add("n", 1) == 4


def test_keys_of_ranks_that_do_not_run(tmp_path: Path) -> None:
    """They have the value of this rank's key, if the rank's number is all that differs; its own is not taken for another's."""
    third = store(tmp_path, 2)
    third.set("host/2/port", "80")
    assert third.multi_get(["host/0/port", "host/3/port"]) == [b"80", b"80"]
    assert third.check(["host/1/port", "host/2/port"])
    assert not third.check(["host/4/port"])
    assert not third.check(["guest/1/port"])
    assert not store(tmp_path, 1).check(["host/0/port"])


def test_the_first_that_compares_and_sets_wins(tmp_path: Path) -> None:
    """An empty expectation sets what is not there; else the expected value must be there."""
    first, last = store(tmp_path, 0), store(tmp_path, 3)
    assert first.compare_set("leader", "", "0") == b"0"
    assert last.compare_set("leader", "", "3") == b"0"
    assert last.compare_set("leader", "1", "3") == b"0"
    assert last.compare_set("leader", "0", "3") == b"3"
    assert last.compare_set("none", "1", "3") == b"1"
    assert first.get("leader") == b"3"


def test_a_rank_that_runs_again_does_not_find_what_it_has_set(tmp_path: Path) -> None:
    """It finds what others have set, and may set and count anew."""
    first = store(tmp_path, 0)
    first.set("done", "1")
    first.add("n", 1)
    first.compare_set("leader", "", "0")
    store(tmp_path, 3).set("theirs", "2")
    again = store(tmp_path, 0)
    assert again.list_keys() == ["theirs"]
    assert not again.check(["done"])
    assert again.add("n", 1) == 4
    assert again.compare_set("leader", "", "00") == b"00"
    again.append("done", "x")
    assert again.get("done") == b"x"
    assert [again.delete_key("done"), again.delete_key("done")] == [True, False]
