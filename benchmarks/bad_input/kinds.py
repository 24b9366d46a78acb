"""The kinds of malformed input, each a function that makes a trial from a source of random numbers."""

from __future__ import annotations

import gzip
import json
import os
import random
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.bad_input import material
from benchmarks.bad_input.edits import ODD, Spoiled, edit_bytes, edit_json, leaves, put, wrong_type
from benchmarks.bad_input.material import GPU, Raw
from benchmarks.bad_input.trials import Trial

HOSTILE = (
    "[/bold]",
    "[bold red]x",
    "\x1b[31mred\x1b[0m",
    "\x1b]0;title\x07",
    "a\rb",
    "a\nb",
    "\u202egpj.exe",
    "$x^$",
    ":smile:",
    "\ud800",
    "²",
    "\x00",
    "%s%n{}",
    "<script>alert(1)</script>",
    " ",
    "x" * 3000,
    "\x9b31m",
    "=cmd|' /C calc'!A0",
)


class Workshop:
    """A folder with valid inputs, and numbered names for spoiled ones."""

    def __init__(self, folder: Path, rng: random.Random) -> None:
        self.folder, self.rng = folder, rng
        self.count = 0
        self.plan_document = material.plan()
        self.plan = folder / "good-plan.json"
        self.plan.write_text(json.dumps(self.plan_document))
        self.capture = folder / "good.trace"
        material.capture().save(self.capture)
        self.capture_document = json.loads(gzip.decompress(self.capture.read_bytes()))
        self.job = folder / "good-job.toml"
        self.job.write_text(material.toml_of(material.JOB))
        self.suite = folder / "good-suite.toml"
        self.suite.write_text(material.toml_of(material.SUITE))
        material.write_models(folder)
        self.hardware = material.shipped("hardware", GPU)
        self.cluster = material.shipped("clusters", "hgx-h100")

    def name(self, suffix: str) -> Path:
        """A new one."""
        self.count += 1
        return self.folder / f"spoiled{self.count}{suffix}"

    def write(self, spoiled: Spoiled, suffix: str) -> Path:
        """The spoiled file."""
        path = self.name(suffix)
        path.write_bytes(spoiled.content)
        return path

    def missing(self) -> Path:
        """Something that is no readable file: a folder, nothing, a FIFO without a writer, a link into nowhere or to itself."""
        path = self.name("")
        kind = self.rng.choice(("nothing", "folder", "fifo", "dangling", "loop", "name", "long", "socket", "below"))
        if kind == "folder":
            path.mkdir()
        elif kind == "fifo":
            os.mkfifo(path)
        elif kind == "dangling":
            path.symlink_to("nowhere")
        elif kind == "loop":
            path.symlink_to(path.name)
        elif kind == "name":
            path = self.folder / f"{self.rng.choice(HOSTILE[:7])}-no.json"
        elif kind == "long":
            path = self.folder / ("n" * 300)
        elif kind == "below":
            path = self.plan / "x.json"
        elif kind == "socket":
            with socket.socket(socket.AF_UNIX) as listening:
                listening.bind(str(path))
        return path


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
    texts = [p for p in leaves(document) if isinstance(_at(document, p), str) and p[0] not in ("format", "settings")]
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


def _at(document: Any, path: tuple[str | int, ...]) -> Any:
    for key in path:
        document = document[key]
    return document


def captures(shop: Workshop) -> Trial:
    """Captured steps with an edit."""
    rng = shop.rng
    if rng.random() < 0.75:
        document = edit_json(shop.capture_document, rng, optional=_OPTIONAL_INFO, free=_free_capture)
        content, refuse = gzip.compress(document.content, 1), document.refuse
        if "(huge)" in document.what or "e300" in document.what or "999" in document.what:
            refuse = None  # some numbers may be large: of an argument, of an event
        spoiled = Spoiled(content, document.what, refuse)
    elif rng.random() < 0.5:
        spoiled = edit_bytes(shop.capture.read_bytes(), rng, packed=True)
        spoiled = spoiled._replace(refuse=None if spoiled.what in ("gzipped", "null") else spoiled.refuse)
    else:
        inner = edit_bytes(gzip.decompress(shop.capture.read_bytes()), rng)
        spoiled = Spoiled(gzip.compress(inner.content), f"inside: {inner.what}", inner.refuse)
    path = shop.write(spoiled, ".trace")
    more = rng.choice(((), ("--json",), ("--memory", "--time")))
    return Trial(
        kind="captures",
        what=spoiled.what,
        arguments=("simulate", str(path), "--gpu", GPU, "--quiet", *more),
        refuse=spoiled.refuse,
        names=(path.name,),
    )


_OPTIONAL_INFO = tuple(material.capture().info.document())


def _free_capture(path: tuple[str | int, ...]) -> bool:
    """Where other values may make sense: any text, arguments, what a table of `info` holds."""
    return (
        path[0] in ("sources", "streams")
        or "arguments" in path
        or path[:2] == ("signatures", 3)
        or (len(path) > 2 and (path[:2] == ("signatures", 0) or path[0] in ("modules", "info")))
    )


def hostile_captures(shop: Workshop) -> Trial:
    """Valid captures with text that a terminal, rich or matplotlib would obey, drawn as well as printed."""
    rng = shop.rng
    document = json.loads(json.dumps(shop.capture_document))
    text = rng.choice(HOSTILE)
    path = rng.choice(
        (
            ("info", "model"),
            ("info", "gpu"),
            ("modules", 0, 1),
            ("modules", 2, 1),
            ("sources", 1),
            ("streams", 0),
            ("groups", 0, 0),
            ("signatures", 0, 1),
            ("storages", 6, 2),
            ("storages", 6, 4),
        )
    )
    put(document, path, text)
    file = shop.write(Spoiled(gzip.compress(json.dumps(document).encode(), 1), "", None), ".trace")
    more = rng.choice(
        (
            ("--memory", "--time"),
            ("--json",),
            ("--memory-png", str(shop.name(".png"))),
            ("--trace", str(shop.name(".json"))),
            ("--memory-html", str(shop.name(".html"))),
            ("--memory-snapshot", str(shop.name(".pickle"))),
        )
    )
    return Trial(
        kind="hostile captures",
        what=f"{'.'.join(map(str, path))} = {text[:30]!r}",
        arguments=("simulate", str(file), "--gpu", GPU, "--quiet", *more),
        refuse=None,
        names=(file.name,),
    )


OPERATORS = (
    "aten.mm.default",
    "aten.addmm.default",
    "aten.bmm.default",
    "aten.baddbmm.default",
    "aten._scaled_mm.default",
    "aten._grouped_mm.default",
    "aten.convolution.default",
    "aten.convolution_backward.default",
    "aten.embedding.default",
    "aten.embedding_dense_backward.default",
    "aten._scaled_dot_product_flash_attention.default",
    "aten._scaled_dot_product_flash_attention_backward.default",
    "aten._scaled_dot_product_cudnn_attention.default",
    "aten._scaled_dot_product_efficient_attention.default",
    "aten._scaled_dot_product_efficient_attention_backward.default",
    "flex_attention",
    "flex_attention_backward",
    "aten._fused_rms_norm.default",
    "aten.native_layer_norm.default",
    "aten.sum.dim_IntList",
    "aten.topk.default",
    "aten.sort.default",
    "aten.index_put_.default",
    "aten.scatter_add_.default",
    "aten.cat.default",
    "aten._foreach_add_.List",
    "aten._fused_adamw_.default",
    "aten.copy_.default",
    "aten._local_scalar_dense.default",
    "aten._log_softmax.default",
    "aten.cumsum.default",
    "aten.histc.default",
    "aten.native_batch_norm.default",
    "aten.max_pool2d_with_indices.default",
    "triton.kernel",
    "no.such.operator",
    "",
    ".",
    "aten",
    "aten..",
)
_ARGUMENTS = (
    "dim",
    "dims",
    "normalized_shape",
    "k",
    "stride",
    "groups",
    "transposed",
    "is_causal",
    "alpha",
    "output_mask",
)
_PLAIN: tuple[Any, ...] = (
    None,
    True,
    0,
    -1,
    2**40,
    1.5,
    float("nan"),
    float("inf"),
    "text",
    [],
    [0],
    [None],
    [[1, 2], 3],
    [9] * 9,
)


def _tensor(rng: random.Random) -> list[Any]:
    """Any tensor that can be."""
    shape = [rng.choice((0, 1, 2, 7, 64, 256, 4096)) for _ in range(rng.randrange(6))]
    stride = [rng.choice((0, 1, 64, 2**20)) for _ in shape]
    dtype = rng.choice(("bfloat16", "float32", "float8_e4m3fn", "int64", "bool", "complex64", "no dtype", ""))
    return [shape, stride, dtype, rng.choice(("device", "device", "cpu"))]


def shuffled_captures(shop: Workshop) -> Trial:
    """Captured steps whose numbers are within their ranges and make no sense: swapped, shifted, repeated."""
    rng = shop.rng
    document = json.loads(json.dumps(shop.capture_document))
    numbers = [p for p in leaves(document) if type(_at(document, p)) is int and p[0] != "schema"]
    changed = []
    for _ in range(rng.randrange(1, 4)):
        path = rng.choice(numbers)
        new = rng.choice((0, 1, 2, 3, 5, -1, 2**20, 2**40, _at(document, rng.choice(numbers))))
        put(document, path, new)
        changed.append(f"{'.'.join(map(str, path))} = {new}")
    if rng.random() < 0.3:
        rng.shuffle(document["events"]["order"])
        changed.append("events shuffled")
    if rng.random() < 0.6:
        signatures = document["signatures"]
        row = rng.randrange(len(signatures[0]))
        signatures[0][row] = rng.choice(OPERATORS)
        for column, name in ((1, 5), (2, 6)):
            signatures[column][row] = [_tensor(rng) for _ in range(rng.choice((0, 1, 2, 3, 3, 5, 9)))]
            operators = document["events"]["columns"]["Op"]
            for i, used in enumerate(operators[0]):
                if used == row:
                    operators[name][i] = [-1] * len(signatures[column][row])
        signatures[6][row] = []
        signatures[3][row] = [[rng.choice(_ARGUMENTS), rng.choice(_PLAIN)] for _ in range(rng.randrange(4))]
        changed.append(f"{signatures[0][row]} of {signatures[1][row]}")
    file = shop.write(Spoiled(gzip.compress(json.dumps(document).encode(), 1), "", None), ".trace")
    return Trial(
        kind="shuffled captures",
        what="; ".join(changed),
        arguments=(
            "simulate",
            str(file),
            "--gpu",
            GPU,
            "--quiet",
            *rng.choice(((), ("--json",), ("--memory", "--time"))),
        ),
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
    value = _at(table, path)
    kind = rng.choice(("type", "extreme", "key", "odd", "empty", "date", "missing"))
    refuse: bool | None = True
    if kind == "key":
        table[rng.choice(("colour", "[/bold]", "\x1b[31m", "Name", "", "ключ"))] = 1
        what = "another key"
    elif kind == "missing":
        del _at(table, path[:-1])[path[-1]]
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
        spoiled = _edit_toml(shop.hardware, rng, optional=("description", "cluster", "models_of"))
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
