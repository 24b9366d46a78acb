"""Captures kept on disk: what a request_fingerprint covers, and a folder that several processes use."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from autosac.capture.process import store
from autosac.capture.process.server import CaptureServer
from autosac.capture.process.store import CaptureStore, default_store, request_fingerprint, surroundings
from autosac.capture.request import TitanRequest
from autosac.errors import UsageError
from autosac.trace import Trace
from traces import trace_of

JOB = '[model]\nname = "llama3"\nflavor = "debugmodel"\n'


def trace(number: int = 0) -> Trace:
    """A trace of nothing, with a number."""
    return trace_of(seq_len=number + 1)


@pytest.fixture
def saved(tmp_path: Path) -> bytes:
    """A saved trace."""
    trace(7).save(tmp_path / "saved")
    return (tmp_path / "saved").read_bytes()


@pytest.fixture
def job(tmp_path: Path) -> Path:
    """A job file."""
    path = tmp_path / "job.toml"
    path.write_text(JOB)
    return path


def key(job: Path | None, *overrides: str, **arguments: Any) -> str | None:
    """The request_fingerprint of a request in fixed surroundings."""
    request = TitanRequest(config_file=str(job) if job else None, overrides=overrides, world_size=8, **arguments)
    return request_fingerprint(request, {"versions": 1})


def test_a_fingerprint_covers_the_job(job: Path, tmp_path: Path) -> None:
    """Text, arguments, rank, checkpointing, a plan and the surroundings count; the files' names do not, nor what the plan says
    of itself.
    """
    plan, same = tmp_path / "plan", tmp_path / "same.toml"
    plan.write_text("{}")
    same.write_text(JOB)
    keys = [
        key(job),
        key(job, "--training.seq_len", "128"),
        key(job, rank=1),
        key(job, checkpointing="full"),
        key(job, observe=True),
        key(job, checkpointing="plan", plan_file=str(plan)),
        key(None),
        request_fingerprint(TitanRequest(config_file=str(job), world_size=8), {"versions": 2}),
    ]
    assert None not in keys and len(set(keys)) == len(keys)
    assert key(same) == keys[0]
    plan.write_text('{"predictions": {"none": 1}, "reasons": [2], "certainty": 3}')
    assert key(job, checkpointing="plan", plan_file=str(plan)) == keys[5]
    for text in ('{"units": []}', "{", "[]"):
        plan.write_text(text)
        assert key(job, checkpointing="plan", plan_file=str(plan)) != keys[5]
    job.write_text(f"{JOB}# a remark\n")
    assert key(job) != keys[0]


@pytest.mark.parametrize(
    ("text", "overrides"),
    [
        ('[experimental]\ncustom_import = "mine"\n', ()),
        ('[job]\ncustom_config_module = "mine.config"\n', ()),
        (JOB, ("--experimental.custom_import", "mine")),
        (JOB, ("--experimental.custom-import=mine",)),
        (JOB, ("--job.config_file", "other.toml")),
        ('[model]\nname = "flux"\n', ()),
        (JOB, ("--model.name", "mine")),
        (JOB, ("--model.name=mine",)),
        ("no toml", ()),
    ],
)
def test_a_job_that_depends_on_more_has_no_fingerprint(job: Path, text: str, overrides: tuple[str, ...]) -> None:
    """Modules of the user, another job file, models that read files, and files that are no jobs."""
    job.write_text(text)
    assert key(job, *overrides) is None


def test_own_modules_do_not_count_as_the_users(job: Path) -> None:
    """A job that uses this project's plugin can be kept; a file that is missing cannot."""
    job.write_text(f'{JOB}[experimental]\ncustom_import = "autosac.integrations.torchtitan"\n')
    assert key(job) is not None
    assert key(job.with_name("missing.toml")) is None


def test_surroundings_see_changed_sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A package's files count by name, size and time, in the current folder if PYTHONPATH says so; so does the environment."""
    package = tmp_path / "torchtitan" / "models"
    package.mkdir(parents=True)
    (package.parent / "__init__.py").touch()
    (package / "model.py").write_text("a = 1\n")
    monkeypatch.chdir(tmp_path)
    around = surroundings()
    assert around is not None and str(package.parent) not in [root for root, _ in around["sources"]]
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.syspath_prepend(tmp_path)
    before, again = surroundings(), surroundings()
    assert before is not None and before == again
    assert str(package.parent) in [root for root, _ in before["sources"]]
    os.utime(package / "model.py", ns=(1, 1))
    monkeypatch.setenv("TORCH_MADE_UP", "1")
    after = surroundings()
    assert after is not None and after["sources"] != before["sources"]
    assert after["environment"]["TORCH_MADE_UP"] == "1"


def test_what_is_put_is_got(tmp_path: Path, saved: bytes) -> None:
    """A capture comes back whole; another key has none, nor has a folder that is not there."""
    kept = CaptureStore(tmp_path / "folder")
    assert kept.get("a") is None
    kept.put("a", saved)
    assert kept.get("a") == trace(7) and kept.get("b") is None


def test_nobody_else_can_read(tmp_path: Path, saved: bytes) -> None:
    """The folder is 0700 and its files are 0600, also those that an earlier version has left open to all."""
    folder = tmp_path / "folder"
    folder.mkdir(mode=0o755)
    (folder / "old.trace").write_bytes(saved)
    (folder / "old.trace").chmod(0o644)
    CaptureStore(folder).put("a", saved)
    modes = {path.name: path.stat().st_mode & 0o777 for path in (folder, *folder.iterdir())}
    assert modes == {"folder": 0o700, "old.trace": 0o600, "a.trace": 0o600}


def test_another_users_captures(tmp_path: Path, saved: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder of somebody else is neither read nor written."""
    kept = CaptureStore(tmp_path)
    kept.put("a", saved)
    monkeypatch.setattr(os, "getuid", lambda: tmp_path.stat().st_uid + 1)
    assert kept.get("a") is None
    with pytest.raises(UsageError, match="belongs to another user: set XDG_CACHE_HOME to a folder of your own"):
        kept.put("b", saved)


def test_unfinished_files_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a killed process has left half-written is removed when the store is opened; no other file is."""
    folder = tmp_path / "autosac" / "captures"
    folder.mkdir(parents=True)
    for name in (".a.trace.autosac-12345678", ".mine", "mine.autosac-1"):
        (folder / name).touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("AUTOSAC_CACHE", "on")
    default_store()
    assert sorted(path.name for path in folder.iterdir()) == [".mine", "mine.autosac-1"]


@pytest.mark.parametrize("damage", [b"", b"no trace", b"\x1f\x8b\x08"])
def test_a_damaged_file_is_removed(tmp_path: Path, saved: bytes, damage: bytes) -> None:
    """Truncated or overwritten, it is as if it had never been kept, and its place can be taken."""
    kept = CaptureStore(tmp_path)
    kept.put("a", saved)
    (tmp_path / "a.trace").write_bytes(damage)
    assert kept.get("a") is None and not (tmp_path / "a.trace").exists()
    kept.put("a", saved[: len(saved) // 2])
    assert kept.get("a") is None
    kept.put("a", saved)
    assert kept.get("a") == trace(7)


def test_the_least_recently_used_goes_first(tmp_path: Path, saved: bytes) -> None:
    """With room for two, the one that was not used since goes; the newest stays even if it alone is too large."""
    kept = CaptureStore(tmp_path, limit_bytes=2 * len(saved))
    for time, name in enumerate("ab"):
        kept.put(name, saved)
        os.utime(tmp_path / f"{name}.trace", ns=(time, time))
    assert kept.get("a") is not None
    kept.put("c", saved)
    assert sorted(path.name for path in tmp_path.glob("*.trace")) == ["a.trace", "c.trace"]
    (tmp_path / "e.program").write_bytes(b"the compiler's")
    assert kept.size() == (2, 2 * len(saved) + 14)
    CaptureStore(tmp_path, limit_bytes=1).put("d", saved)
    assert [path.name for path in tmp_path.glob("*.*")] == ["d.trace"]
    kept.clear()
    assert not list(tmp_path.glob("*.*"))


def test_where_the_users_store_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, saved: bytes) -> None:
    """Under XDG_CACHE_HOME, and nowhere with AUTOSAC_CACHE=off."""
    assert default_store() is None  # the tests' own setting
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("AUTOSAC_CACHE", "on")
    chosen = default_store()
    assert chosen is not None
    chosen.put("a", saved)
    assert (tmp_path / "autosac" / "captures" / "a.trace").exists()


def test_a_kept_capture_needs_no_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, saved: bytes) -> None:
    """A server answers from the store without starting its process; for debugging it would not."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("AUTOSAC_CACHE", "on")
    request = TitanRequest(config_file=None)
    name = request_fingerprint(request, surroundings())
    assert name is not None
    CaptureStore(tmp_path / "autosac" / "captures").put(name, saved)
    with CaptureServer() as server:
        assert server.capture(request) == trace(7)
        assert server.process_id() is None
    with CaptureServer(debug=True) as server:
        assert not server.submit(request).done()


def test_a_capture_is_kept_unless_its_sources_have_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, saved: bytes
) -> None:
    """What arrives is kept under its request's key; where the request_fingerprint has changed meanwhile it is not."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("AUTOSAC_CACHE", "on")
    request = TitanRequest(config_file=None)
    name = request_fingerprint(request, surroundings())
    assert name is not None
    kept = default_store()
    assert kept is not None
    monkeypatch.setattr(store, "SOURCES", ("json",))
    kept.put_unless_changed(name, request, saved)
    folder = tmp_path / "autosac" / "captures"
    assert kept.folder == folder and not folder.exists()
    monkeypatch.undo()
    kept.put_unless_changed(name, request, saved)
    assert [path.stem for path in folder.iterdir()] == [name]
