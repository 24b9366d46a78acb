"""What the ranks of a script tell each other through files, in one process."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from autosac.scripts import waits
from autosac.scripts.exchange import Exchange
from autosac.scripts.waits import awaited


def end(folder: Path, rank: int, shown: int = 0) -> Exchange:
    """A rank's end of it."""
    return Exchange(folder, rank, shown)


def test_messages_arrive_in_the_order_in_which_they_were_sent(tmp_path: Path) -> None:
    """Each group and pair of ranks counts its own messages; values come with the receiver's dtype."""
    first, second = end(tmp_path, 0), end(tmp_path, 1)
    for values in ([1, 2], [3], [2**40, -7]):
        first.send("a", 1, torch.tensor(values))
    first.send("b", 1, torch.tensor([5], dtype=torch.int32))
    second.send("a", 0, torch.tensor([9]))
    later = [second.receive("a", 0, torch.int64) for _ in range(3)]
    assert [take().tolist() for take in later] == [[1, 2], [3], [2**40, -7]]
    assert second.receive("b", 0, torch.int32)().tolist() == [5]
    assert first.receive("a", 1, torch.int64)().tolist() == [9]
    assert not list(tmp_path.glob("waits-*"))


@pytest.mark.parametrize(
    ("sent", "received"),
    [(None, None), (torch.empty(0, dtype=torch.int64), []), (torch.tensor([[1, 2], [3, 4]]).T, [1, 3, 2, 4])],
    ids=["unknown", "empty", "transposed"],
)
def test_what_a_message_says(tmp_path: Path, sent: torch.Tensor | None, received: list[int] | None) -> None:
    """Nothing, if the sender does not know its values; else all elements in their order."""
    end(tmp_path, 0).send("g", 1, sent)
    found = end(tmp_path, 1).receive("g", 0, torch.int64)()
    assert (None if found is None else found.tolist()) == received


def test_nobody_waits_for_a_rank_that_will_not_run(tmp_path: Path) -> None:
    """What it would send is not known, and what it would broadcast is what this rank has; those that run are waited for."""
    alone, first = Exchange(tmp_path, 1, 1, (1, 2)), Exchange(tmp_path, 2, 1, (1, 2))
    assert alone.receive("g", 0, torch.int64)() is None
    assert alone.broadcast("g", 0, None, torch.int64) is None
    first.broadcast("g", 2, torch.tensor([7]), torch.int64)
    later = alone.broadcast("g", 2, None, torch.int64)
    assert later is not None and later().tolist() == [7]


def test_a_rank_that_has_ended_goes_on_as_before(tmp_path: Path) -> None:
    """Its last message of that dtype comes again; a dtype that it never sent is not known."""
    first, second = end(tmp_path, 0), end(tmp_path, 1)
    first.send("g", 1, torch.tensor([4, 2]))
    (tmp_path / "ended-0").touch()
    found = [second.receive("g", 0, torch.int64)() for _ in range(2)]
    assert [values.tolist() for values in found] == [[4, 2], [4, 2]]
    assert second.receive("g", 0, torch.int32)() is None


@pytest.mark.parametrize(
    "need",
    [
        lambda exchange: exchange.send("g", 3, None),
        lambda exchange: exchange.receive("g", 3, torch.int64),
        lambda exchange: exchange.needs(3),
    ],
    ids=["sends", "receives", "without values"],
)
def test_a_rank_needs_those_that_it_sends_to_or_receives_from(tmp_path: Path, need: Callable[[Any], Any]) -> None:
    """The launcher finds their names in the folder."""
    exchange = end(tmp_path, 0)
    for _ in range(2):
        need(exchange)
    assert [path.name for path in tmp_path.glob("need-*")] == ["need-3-by-0"]


def test_who_waits_for_a_broadcast(tmp_path: Path) -> None:
    """The root sends; others read it if the root is the rank that always runs, and are taken to be like it if not. That rank
    needs the root, whatever it is: what it has before is not what it gets.
    """
    root, other = end(tmp_path, 0), end(tmp_path, 1)
    assert root.broadcast("g", 0, torch.tensor([6]), torch.int64) is None
    take = other.broadcast("g", 0, None, torch.int64)
    assert take is not None and take().tolist() == [6]
    assert end(tmp_path, 2).broadcast("g", 1, None, torch.int64) is None
    assert not list(tmp_path.glob("need-*"))
    take = root.broadcast("g", 1, None, torch.int64)
    assert other.broadcast("g", 1, torch.tensor([8]), torch.int64) is None
    assert take is not None and take().tolist() == [8]
    assert [path.name for path in tmp_path.glob("need-*")] == ["need-1-by-0"]
    take = end(tmp_path, 0, shown=1).broadcast("g", 1, None, torch.int64)
    assert take is not None and take().tolist() == [8]


def test_ranks_that_are_priced_together(tmp_path: Path) -> None:
    """Their folders are those in the launcher's file."""
    (tmp_path / "together.json").write_text(json.dumps(["a", "b"]))
    assert end(tmp_path, 0).together() == (Path("a"), Path("b"))


def test_ranks_that_run_meet_at_a_barrier(tmp_path: Path) -> None:
    """Each one waits for the other, as often as there are barriers; not for one that has ended, or has not begun."""
    for rank in range(2):
        (tmp_path / f"rank-{rank}").mkdir()
    passed: list[int] = []

    def second() -> None:
        end(tmp_path, 1).barrier("g", (0, 1, 2))
        passed.append(1)

    thread = threading.Thread(target=second)
    thread.start()
    thread.join(0.1)
    assert not passed
    first = end(tmp_path, 0)
    first.barrier("g", (0, 1, 2))
    thread.join()
    assert passed == [1]
    (tmp_path / "ended-1").touch()
    first.barrier("g", (0, 1, 2))
    assert not list(tmp_path.glob("waits-*"))


def test_a_rank_that_was_put_off(tmp_path: Path) -> None:
    """A barrier does not wait for it; who needs a message of it waits until it has run after all."""
    (tmp_path / "rank-1").mkdir()
    (tmp_path / "put-off-1").touch()
    first = end(tmp_path, 0)
    first.barrier("g", (0, 1))
    take = first.receive("g", 1, torch.int64)
    threading.Timer(0.1, end(tmp_path, 1).send, ("g", 0, torch.tensor([7]))).start()
    found = take()
    assert found is not None and found.tolist() == [7]


def test_a_rank_that_waits_for_something_else_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a while: it may wait for this one, which would never come."""
    monkeypatch.setattr(waits, "PATIENCE_S", 0.05)
    (tmp_path / "rank-1").mkdir()
    (tmp_path / "waits-1").touch()
    end(tmp_path, 0).barrier("g", (0, 1))
    assert [path.name for path in tmp_path.glob("waits-*")] == ["waits-1"]


def test_for_whom_a_rank_waits(tmp_path: Path) -> None:
    """Rank 1 for rank 0's next message, until that is there, and for nobody if the file does not say for whom."""
    first, second = end(tmp_path, 0), end(tmp_path, 1)
    assert awaited(tmp_path, 1) is None
    take = second.receive("a", 0, torch.int64)
    thread = threading.Thread(target=take)
    thread.start()
    while awaited(tmp_path, 1) is None:
        pass
    assert awaited(tmp_path, 1) == 0
    first.send("a", 1, torch.tensor([1]))
    assert awaited(tmp_path, 1) is None
    thread.join()
    (tmp_path / "waits-1").touch()
    assert awaited(tmp_path, 1) is None
