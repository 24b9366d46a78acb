"""The kinds of malformed input, each a function that makes a trial from a source of random numbers."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.bad_input import material
from benchmarks.bad_input.capture_kinds import captures, hostile_captures, shuffled_captures
from benchmarks.bad_input.edits import ODD, Spoiled, edit_bytes, edit_json, leaves, put, wrong_type
from benchmarks.bad_input.material import GPU, Raw
from benchmarks.bad_input.trials import Trial
from benchmarks.bad_input.workshop import HOSTILE, Workshop, at


def _reader(shop: Workshop, path: Path) -> tuple[str, ...]:
    """A command that reads a plan."""
    return shop.rng.choice(
        (
            ("explain", str(path)),
            ("explain", str(path), "--json"),
            ("diff", str(shop.plan), str(path)),
            ("diff", str(path), str(shop.plan)),
            ("simulate", str(shop.job), "--gpu", GPU, "--world-size", "2", "--plan", str(path)),
        )
    )


def plans(shop: Workshop) -> Trial:
    """Plan files with an edit."""
    optional = ("reasons", "certainty", "overrides", "offload", "autosac", "none")
    if shop.rng.random() < 0.7:
        spoiled = edit_json(shop.plan_document, shop.rng, optional=optional, free=_free_plan)
    else:
        spoiled = edit_bytes(shop.plan.read_bytes(), shop.rng)
    path = shop.write(spoiled, ".json")
    return Trial(
        kind="plans", what=spoiled.what, arguments=_reader(shop, path), refuse=spoiled.refuse, names=(path.name,)
    )


def _free_plan(path: tuple[str | int, ...]) -> bool:
    """Names of policies and settings may be any, and a saving for each second may be large."""
    return (
        path[-1] == "msps"
        or (len(path) == 2 and path[0] == "predictions")
        or (path[:2] == ("made_for", "job_settings") and len(path) == 3)
    )


def hostile_plans(shop: Workshop) -> Trial:
    """Valid plans with text that a terminal, rich or matplotlib would obey."""
    document = json.loads(json.dumps(shop.plan_document))
    text = shop.rng.choice(HOSTILE)
    texts = [p for p in leaves(document) if isinstance(at(document, p), str) and p[0] not in ("format", "settings")]
    path = shop.rng.choice([p for p in texts if p[-1] != "budget_kind"])
    put(document, path, text)
    file = shop.write(Spoiled(json.dumps(document).encode(), "", None), ".json")
    command = shop.rng.choice((("explain",), ("diff", str(shop.plan)), ("explain", "--json")))
    return Trial(
        kind="hostile plans",
        what=f"{'.'.join(map(str, path))} = {text[:30]!r}",
        arguments=(command[0], *command[1:], str(file)),
        refuse=None,
        names=(file.name,),
    )


_EXTREME = (
    Raw("nan"),
    Raw("inf"),
    Raw("-inf"),
    1e300,
    1e-300,
    -1,
    -0.5,
    Raw("1" * 5000),
    10**400,
    Raw("9" * 25),
    Raw("1e400"),
    Raw("[" * 3000 + "]" * 3000),
)


def _edit_toml(document: dict[str, Any], rng: random.Random, *, optional: tuple[str, ...] = ()) -> Spoiled:
    """One edit of a TOML document, all of whose values have types that are checked."""
    table = json.loads(json.dumps(document))
    path = rng.choice(leaves(table))
    value = at(table, path)
    kind = rng.choice(("type", "extreme", "key", "odd", "empty", "date", "missing"))
    refuse: bool | None = True
    if kind == "key":
        table[rng.choice(("colour", "[/bold]", "\x1b[31m", "Name", "", "ключ"))] = 1
        what = "another key"
    elif kind == "missing":
        del at(table, path[:-1])[path[-1]]
        what, refuse = f"without {path}", None
    else:
        new = {
            "type": wrong_type(value, rng),
            "extreme": rng.choice(_EXTREME),
            "odd": {"odd": [{}]},
            "empty": "",
            "date": Raw("1979-05-27T07:32:00Z"),
        }[kind]
        put(table, path, new)
        shown = new.text[:20] if isinstance(new, Raw) else repr(new)[:30]
        what = f"{'.'.join(map(str, path))} = {shown}"
        if kind == "empty" and isinstance(value, str) and (path[-1] in optional or isinstance(path[-1], int)):
            refuse = None
    try:
        content = material.toml_of(table).encode()
    except UnicodeEncodeError:
        content = material.toml_of(table).encode(errors="surrogatepass")
    return Spoiled(content, what, refuse)


def profiles(shop: Workshop) -> Trial:
    """Hardware profiles with an edit."""
    rng = shop.rng
    if rng.random() < 0.8:
        spoiled = _edit_toml(
            shop.hardware, rng, optional=("description", "device_name", "source", "cluster", "models_of")
        )
    else:
        spoiled = edit_bytes(material.toml_of(shop.hardware).encode(), rng)
    path = shop.write(spoiled, ".toml")
    return Trial(
        kind="profiles",
        what=spoiled.what,
        arguments=("simulate", str(shop.capture), "--gpu", str(path), "--quiet"),
        refuse=spoiled.refuse,
        names=(path.name,),
    )


def bases(shop: Workshop) -> Trial:
    """Profiles based on others: themselves, nothing, names that no file can have; files of measurements that are none."""
    rng = shop.rng
    path, other = shop.name(".toml"), shop.name(".json")
    what = rng.choice(("base", "measured", "calibrated", "cluster"))
    if what == "base":
        value = rng.choice(
            (path.name, "", "no-such-gpu", "a\x00b", "~nobody-has-this-home/x", "../" * 40, "x" * 400, "/dev/zero")
        )
        path.write_text(material.toml_of({"base": value}))
        names: tuple[str, ...] = (path.name, "base", "profile")
    else:
        document = {"measured": material.MEASURED, "calibrated": material.CALIBRATED, "cluster": material.MEASURED}[
            what
        ]
        spoiled = (
            edit_json(document, rng, free=lambda p: "about" in p)
            if rng.random() < 0.7
            else edit_bytes(json.dumps(document).encode(), rng)
        )
        other.write_bytes(spoiled.content)
        path.write_text(material.toml_of({"base": GPU, what: str(other) if what == "cluster" else other.name}))
        names = (path.name, other.name)
    return Trial(
        kind="bases",
        what=what,
        arguments=("simulate", str(shop.capture), "--gpu", str(path), "--quiet"),
        refuse=True if what in ("base", "cluster") else None,
        names=names,
    )


def clusters(shop: Workshop) -> Trial:
    """Cluster files with an edit."""
    rng = shop.rng
    if rng.random() < 0.8:
        spoiled = _edit_toml(shop.cluster, rng, optional=("description",))
    else:
        spoiled = edit_bytes(material.toml_of(shop.cluster).encode(), rng)
    path = shop.write(spoiled, ".toml")
    arguments = ("simulate", str(shop.capture), "--gpu", GPU, "--cluster", str(path), "--quiet")
    return Trial(kind="clusters", what=spoiled.what, arguments=arguments, refuse=spoiled.refuse, names=(path.name,))


def jobs(shop: Workshop) -> Trial:
    """Job files with an edit."""
    rng = shop.rng
    if rng.random() < 0.8:
        spoiled = _edit_toml(material.JOB, rng)
        if spoiled.what.endswith("= ''") or any(f" = {n}" in spoiled.what for n in ("1e", "-1", "-0.5")):
            spoiled = spoiled._replace(
                refuse=None
            )  # of texts and numbers that are not checked TorchTitan may know more
    else:
        spoiled = edit_bytes(shop.job.read_bytes(), rng)
        if spoiled.what == "truncated":
            spoiled = spoiled._replace(refuse=None)
    path = shop.write(spoiled, ".toml")
    command = rng.choice(("plan", "simulate"))
    return Trial(
        kind="jobs",
        what=spoiled.what,
        arguments=(command, str(path), "--gpu", GPU, "--quiet"),
        refuse=spoiled.refuse,
        names=(path.name,),
    )


_NUMBERS = ("0", "-1", "long", "1.5", "", "1e9", "9" * 30, "²", "٣", "1_0", "NaN", " 8", "0x8", "-0")


def job_settings(shop: Workshop) -> Trial:
    """TorchTitan's arguments that cannot be."""
    rng = shop.rng
    whole = (
        "training.local_batch_size",
        "training.seq_len",
        "parallelism.tensor_parallel_degree",
        "parallelism.pipeline_parallel_degree",
        "parallelism.context_parallel_degree",
        "parallelism.data_parallel_replicate_degree",
    )
    world = "1"
    if rng.random() < 0.6:
        name, value = rng.choice(whole), rng.choice(_NUMBERS)
        more: tuple[str, ...] = ()
    else:
        name, value, world, more = rng.choice(
            (
                ("parallelism.pipeline_parallel_degree", "64", "64", ()),
                ("parallelism.tensor_parallel_degree", "32", "32", ()),
                ("parallelism.tensor_parallel_degree", "3", "8", ()),
                ("parallelism.tensor_parallel_degree", "16", "8", ()),
                ("parallelism.data_parallel_shard_degree", "3", "8", ()),
                ("parallelism.data_parallel_shard_degree", "-2", "8", ()),
                ("parallelism.tensor_parallel_degree", "16", "16", ("--model.flavor", "8B")),
                ("parallelism.expert_tensor_parallel_degree", "4", "8", ("--parallelism.expert_parallel_degree", "2")),
                ("training.seq_len", "2047", "1", ()),
                ("training.global_batch_size", "13", "1", ()),
                (
                    "parallelism.pipeline_parallel_microbatch_size",
                    "3",
                    "2",
                    ("--parallelism.pipeline_parallel_degree", "2"),
                ),
            )
        )
    style = rng.randrange(3)
    spelled = name.replace("_", "-") if style == 2 else name
    given = (f"--{spelled}={value}",) if style else (f"--{spelled}", value)
    arguments = (rng.choice(("plan", "simulate")), str(shop.job), "--gpu", GPU, "--world-size", world, "--quiet", "--")
    return Trial(
        kind="job settings", what=f"{name}={value}", arguments=(*arguments, *more, *given), names=(name, name[14:])
    )


def suites(shop: Workshop) -> Trial:
    """Suites of `autosac bench` with an edit."""
    rng = shop.rng
    if rng.random() < 0.8:
        spoiled = _edit_toml(material.SUITE, rng, optional=("alloc_conf",))
        if ".tokens" in spoiled.what or "world_size = 1e" in spoiled.what:
            spoiled = spoiled._replace(refuse=None)  # the arguments of the user's own function
    else:
        spoiled = edit_bytes(shop.suite.read_bytes(), rng)
    path = shop.write(spoiled, ".toml")
    return Trial(
        kind="suites",
        what=spoiled.what,
        arguments=("bench", str(path), "-o", str(shop.name("out")), "--quiet"),
        refuse=spoiled.refuse,
        names=(path.name, "model.py", "module.py"),
    )


def unreadable(shop: Workshop) -> Trial:
    """Inputs that are no files, in every place that takes one."""
    path = str(shop.missing())
    job, capture = str(shop.job), str(shop.capture)
    arguments = shop.rng.choice(
        (
            ("explain", path),
            ("diff", path, str(shop.plan)),
            ("simulate", path, "--gpu", GPU),
            ("plan", path, "--gpu", GPU),
            ("simulate", capture, "--gpu", path),
            ("simulate", capture, "--gpu", GPU, "--cluster", path),
            ("simulate", job, "--gpu", GPU, "--plan", path),
            ("bench", path),
            ("calibrate", path, "--device", "cpu", "-o", str(shop.name(".toml"))),
        )
    )
    return Trial(kind="unreadable", what=" ".join(arguments)[-60:], arguments=arguments)


KINDS: dict[str, tuple[Callable[[Workshop], Trial], int]] = {
    "plans": (plans, 6),
    "hostile plans": (hostile_plans, 3),
    "captures": (captures, 6),
    "shuffled captures": (shuffled_captures, 4),
    "hostile captures": (hostile_captures, 2),
    "profiles": (profiles, 4),
    "bases": (bases, 2),
    "clusters": (clusters, 3),
    "jobs": (jobs, 5),
    "job settings": (job_settings, 4),
    "suites": (suites, 4),
    "unreadable": (unreadable, 2),
}
"""Each kind, and how often it is drawn."""

__all__ = ["KINDS", "ODD", "Workshop"]
