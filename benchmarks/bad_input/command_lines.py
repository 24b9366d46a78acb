"""Malformed command lines, environments and outputs."""

from __future__ import annotations

from pathlib import Path

from benchmarks.bad_input.material import GPU
from benchmarks.bad_input.trials import Trial
from benchmarks.bad_input.workshop import HOSTILE, Workshop

WHOLE = ("0", "-1", "1.5", "²", "٣", "1_0", " 2", "+2", "0x2", "9" * 5000, "1e3", "", "nan", "two", "--", "1000000000")
DECIMAL = ("nan", "inf", "-inf", "-1", "", "١", "1_0", "0x1", "1e999", "--", "one", "1,5", "[/bold]", "\x1b[31m")
TEXT = ("", " ", "--", "[/bold]", "\x1b[31mred", "no-such", "a\nb", "\u202ex", "x" * 3000, "../../etc/passwd", "\ud800")
AMOUNT = (
    "",
    "--",
    "12",
    "0GiB",
    "-3GiB",
    "5 furlongs",
    "130%",
    "1e999GiB",
    "100GiB",
    "nan",
    "inf",
    "NaN%",
    "1e-30GiB",
    "٣GiB",
    "68 GiB GiB",
    "0x44GiB",
    "GiB",
    "%",
    "1_0GiB",
    "[/bold]",
    "\x1b[31m",
    "68GiB\n1GiB",
)
ALLOCATOR = ("nonsense", "max_split_size_mb:" + "9" * 5000, "max_split_size_mb:²", "[/bold]", "backend:x", "a:b:c")
LOADS = ("", "zipf:nan", "zipf:1e300", "zipf:0", "power-law:1e-300", "zipf:²", "[/bold]", "balanced:1", "zipf:")
MODES = ("selective", "selective-0", "selective-²", "selective-" + "9" * 5000, "selective-1.5", "FULL")
# (command, option, values): every value is to be refused.
OPTIONS: tuple[tuple[str, str, tuple[str, ...]], ...] = (
    ("job", "--world-size", WHOLE),
    ("job", "--rank", (*(v for v in WHOLE if v != "0"), "9999")),
    ("job", "--gpu", TEXT),
    ("job", "--cluster", TEXT),
    ("job", "--alloc-conf", ALLOCATOR),
    ("job", "--moe-load", LOADS),
    ("job", "--moe-seed", tuple(v for v in WHOLE if v not in ("0", "1000000000"))),
    ("job", "--moe-draws", WHOLE),
    ("plan", "--budget", AMOUNT),
    ("plan", "--budgets", (*AMOUNT, "1GiB,", "1GiB,1024MiB", ",", ",".join(f"{i}MiB" for i in range(1, 999)))),
    ("plan", "--pareto", (*WHOLE, "1", "1000000")),
    ("plan", "--budget-kind", TEXT),
    ("plan", "--confidence", (*DECIMAL, "0", "1", "0.9999999999999999", "99", "1e-999")),
    ("plan", "--maximize", TEXT),
    ("plan", "--batch-sizes", ("4", "", "4,4")),
    ("plan", "--solver", TEXT),
    ("plan", "--milp", TEXT),
    ("plan", "--time-limit", (*DECIMAL, "0", "1e300")),
    ("plan", "--gap", (*DECIMAL, "1", "2")),
    ("simulate", "--ac", (*TEXT, *MODES)),
    ("simulate", "--interference", TEXT),
    ("simulate", "--collectives", TEXT),
    ("capture", "--rank", ("0", "9999")),
    ("capture", "--ac", ("full", "")),
    ("capture", "--moe-load", ("uniform",)),
    ("capture", "--world-size", ("1", "8", "1000000000")),
    ("capture", "--cluster", TEXT),
    ("explain", "--module", tuple(v for v in TEXT)),
    ("bench", "--models", (*TEXT, "toy,,", ",")),
    ("bench", "--configurations", TEXT),
    ("bench", "--policies", (*TEXT, "selective-0", "selective-" + "9" * 5000, "memory-budget-2", "none,none")),
    ("bench", "--budgets", (*AMOUNT, "1GiB,1GiB")),
    ("bench", "--milp", TEXT),
    ("bench", "--time-limit", (*DECIMAL, "0", "1e300")),
    ("bench", "--steps", WHOLE),
    ("bench", "--device", TEXT),
    ("calibrate", "--world-size", WHOLE),
    ("calibrate", "--minutes", (*DECIMAL, "0", "1e300")),
    ("calibrate", "--threads", WHOLE),
    ("calibrate", "--device", TEXT),
)


def _command(shop: Workshop, which: str) -> list[str]:
    """A valid command that stops before it does any work, or does little."""
    job, capture = str(shop.job), str(shop.capture)
    if which == "job":
        which = shop.rng.choice(("plan", "simulate"))
    return {
        "plan": ["plan", job, "--gpu", GPU],
        "simulate": ["simulate", job, "--gpu", GPU],
        "capture": ["simulate", capture, "--gpu", GPU],
        "explain": ["explain", str(shop.plan)],
        "bench": ["bench", str(shop.suite), "-o", str(shop.name("out"))],
        "calibrate": ["calibrate", "--device", "cpu", "-o", str(shop.folder / "profile.toml")],
    }[which]


def options(shop: Workshop) -> Trial:
    """One option with a value that it cannot have."""
    which, option, values = shop.rng.choice(OPTIONS)
    value = shop.rng.choice(values)
    arguments = _command(shop, which)
    if option == "--moe-draws":
        arguments += ["--moe-load", "uniform"]
    if option == "--moe-seed":
        arguments += ["--moe-load", "uniform"]
    joined = shop.rng.random() < 0.7 or value.startswith("-")
    arguments += [f"{option}={value}"] if joined else [option, value]
    known = {"--module": "checkpoints no module", "--gpu": "GPU", "--alloc-conf": "PYTORCH_CUDA_ALLOC_CONF"}
    names = (
        option,
        option[2:],
        option[2:].replace("-", " "),
        option[2:-1],
        known.get(option, option),
        "expert load",
        "activation checkpointing",
        "MILP",
        value.strip()[:20] or option,
        "polic",
        "budget",
        "batch size",
        "profile",
        "time limit",
        "model",
        "cluster",
        "captured",
        "gap",
    )
    return Trial(kind="options", what=f"{which} {option} {value[:30]!r}", arguments=tuple(arguments), names=names)


def shapes(shop: Workshop) -> Trial:
    """Command lines of the wrong form."""
    job, plan, suite = str(shop.job), str(shop.plan), str(shop.suite)
    hostile = shop.rng.choice(HOSTILE).replace("\0", "")
    arguments = shop.rng.choice(
        (
            (),
            ("",),
            (hostile,),
            ("plan",),
            ("plan", job),
            ("plan", "", "--gpu", GPU),
            ("plan", job, job, "--gpu", GPU),
            ("plan", job, "--gpu", GPU, f"--{hostile}"),
            ("plan", job, "--gpu", GPU, "--budgets", "1GiB", "--pareto", "3"),
            ("plan", job, "--gpu", GPU, "--maximize", "tokens-per-second", "--pareto", "3"),
            ("plan", job, "--gpu", GPU, "--pareto", "3", "--confidence", "0.9"),
            ("plan", job, "--gpu", GPU, "--moe-seed", "3"),
            ("plan", job, "--gpu", GPU, "--moe-load", "uniform", "--pareto", "3"),
            ("plan", job, "--gpu", GPU, "--pareto-html", str(shop.name(".html"))),
            ("simulate", job, "--gpu", GPU, "--plan", plan, "--ac", "full"),
            ("simulate", job, "--gpu", GPU, "--plan", plan),  # made for another world
            ("simulate", plan, "--gpu", GPU),
            ("simulate", suite, "--gpu", GPU),
            ("simulate", str(shop.capture), "--gpu", GPU, "--", "--training.seq_len", "8"),
            ("explain",),
            ("explain", plan, plan),
            ("explain", job),
            ("explain", str(shop.capture)),
            ("explain", suite),
            ("diff", plan),
            ("diff", plan, job),
            ("bench", plan),
            ("bench", job),
            ("bench", suite, "--measure", "--device", "cpu", "--steps", "0"),
            ("calibrate", "-o", str(shop.name(".json")), "--device", "cpu"),
            ("calibrate", job, "--sweep", "-o", str(shop.name(".toml")), "--device", "cpu"),
            ("calibrate", "--device", "cpu"),
            ("calibrate", "-o", str(shop.name(".toml")), "--device", "cpu", "--", "--x", "1"),
            ("explain", plan, "--debug=1"),
            ("-o--",),
            ("plan", job, "--gpu", GPU, "-o--"),
        )
    )
    return Trial(kind="shapes", what=" ".join(arguments)[:80], arguments=arguments)


def environments(shop: Workshop) -> Trial:
    """Environment variables that are no numbers, or no folders."""
    job, output = str(shop.job), str(shop.name(".toml"))
    numbers = ("²", "x", "", "-1", "1.5", "٣", "1e9", "9" * 40, " ", "\x1b[31m")
    name = shop.rng.choice(("NGPU", "NGPU", "WORLD_SIZE", "RANK", "LOCAL_RANK", "AUTOSAC_CACHE"))
    if name == "AUTOSAC_CACHE":
        value = shop.rng.choice(("rel/ative", "/proc/x", str(shop.plan), "[/bold]", "never", "\x1b[31m", "./x"))
    else:
        value = shop.rng.choice((*numbers, "0") if name in ("NGPU", "WORLD_SIZE") else (*numbers, "4097"))
    arguments = ("plan", job, "--gpu", GPU) if name in ("NGPU",) else ("calibrate", "--device", "cpu", "-o", output)
    if name == "AUTOSAC_CACHE":
        arguments = ("plan", job, "--gpu", GPU)
    return Trial(
        kind="environments", what=f"{name}={value!r}", arguments=arguments, names=(name,), environment={name: value}
    )


# (command, its outputs)
OUTPUTS = (
    ("plan", ("-o", "--pareto-html", "--pareto-png")),
    ("capture", ("--trace", "--memory-html", "--memory-png", "--memory-snapshot", "--save-capture")),
    ("bench", ("--docs", "-o")),
    ("calibrate", ("-o",)),
)


def outputs(shop: Workshop) -> Trial:
    """Outputs that cannot be written, or would overwrite what is read; every output of every command."""
    rng = shop.rng
    which, names = rng.choice(OUTPUTS)
    option = rng.choice(names)
    arguments = _command(shop, which)
    if which == "plan":
        arguments += ["--pareto", "3"]
    suffix = ".toml" if which == "calibrate" else ".out"
    path = shop.name(suffix)
    kind = rng.choice(
        ("folder", "below a file", "proc", "no folder", "long", "loop", "full", "empty", "input", "twice")
    )
    if kind == "folder":
        path.mkdir()
    elif kind == "below a file":
        path = shop.plan / f"x{suffix}"
    elif kind == "proc":
        path = Path(f"/proc/x{suffix}")
    elif kind == "no folder":
        path = shop.folder / rng.choice(("none", "[/bold]", "a\nb", "\x1b[31m")) / f"x{suffix}"
    elif kind == "long":
        path = shop.folder / ("n" * 300 + suffix)
    elif kind == "loop":
        path.symlink_to(path.name)
    elif kind == "full" and which == "capture":
        path = Path("/dev/full")
    elif kind == "input" and which in ("plan", "capture"):
        path = shop.job if which == "plan" else shop.capture
        if rng.random() < 0.5:
            link = shop.name(suffix)
            link.symlink_to(path)
            path = link
    elif kind == "twice" and which == "capture":
        other = rng.choice([name for name in names if name != option])
        arguments += [f"{other}={path}"]
    else:
        kind, path = "empty", Path()
    text = "" if kind == "empty" else str(path)
    refuse: bool | None = True
    if which == "bench" and option == "-o":
        arguments = arguments[:2]
        if kind in ("folder", "no folder"):
            path, refuse, kind = shop.name(".folder"), False, "new folder"  # it is made
            text = str(path)
    if which == "calibrate":
        arguments = arguments[:3]
    given = (f"{option}={text}",) if option.startswith("--") else (option, text)
    return Trial(
        kind="outputs",
        what=f"{which} {option}: {kind}",
        arguments=(*arguments, *given),
        refuse=refuse,
        names=(Path(text).name[-12:] or option, option),
    )


COMMAND_LINES = {
    "options": (options, 8),
    "shapes": (shapes, 3),
    "environments": (environments, 2),
    "outputs": (outputs, 4),
}
