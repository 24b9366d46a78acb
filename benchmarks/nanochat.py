"""nanochat's own training script, beside what its leaderboard publishes: ``python -m benchmarks.nanochat --truth DIR``.

DIR is a checkout of github.com/karpathy/nanochat at 348fbb3, whose packages (tiktoken, pyarrow, rustbpe, wandb) must be
installed. The script runs unmodified but for one line, on eight H100s of 80 GB, with a vocabulary of 32,768 and made-up text:
its norms keep 16 bits under autocast, as in PyTorch 2.9, which the runs used. Since then autocast makes them float32, which
FlashAttention's kernels refuse.

    24 layers   dev/LEADERBOARD.md, run 1: 10,949.47 s for 16,704 - 10 steps of 524,288 tokens (bfloat16)
    26 layers   dev/LOG.md, "FP8 training": 630,000 tokens/s without float8

Nothing was fitted to them.
"""

from __future__ import annotations

import argparse
import json
import os
import pickle
import random
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from autosac.errors import UsageError
from benchmarks.ending import exit_code

TOKENS = 524_288
PUBLISHED = {24: TOKENS * (16_704 - 10) / 10_949.47, 26: 630_000.0}  # tokens/s of eight GPUs, by layers
_VOCABULARY = 32_768
_ROLES = ("user", "assistant", "python", "output")
_SPECIAL = ("bos", *(f"{role}_{edge}" for role in _ROLES for edge in ("start", "end")))
_NORM = "    return F.rms_norm(x, (x.size(-1),))"
_NARROW = "    with torch.autocast('cuda', enabled=False):\n        return F.rms_norm(x, (x.size(-1),))"
_OPTIONS = "--run=dummy --device-batch-size=16 --sample-every=-1 --save-every=-1 --core-metric-every=-1 --eval-every=-1"


def make_data(folder: Path) -> None:
    """A tokenizer of bytes and pairs of bytes, and two files of made-up words. UsageError without the packages."""
    try:
        import pyarrow
        import pyarrow.parquet
        import tiktoken
        import torch
    except ImportError as e:
        raise UsageError(f"nanochat's packages are not installed: {e}") from e
    (folder / "tokenizer").mkdir(parents=True)
    (folder / "base_data").mkdir()
    plain = _VOCABULARY - len(_SPECIAL)
    tokens = [bytes([a]) for a in range(256)] + [bytes([a, b]) for a in range(256) for b in range(256)]
    encoding = tiktoken.Encoding(
        name="made-up",
        pat_str=r"\S+|\s+",
        mergeable_ranks={token: rank for rank, token in enumerate(tokens[:plain])},
        special_tokens={f"<|{name}|>": plain + i for i, name in enumerate(_SPECIAL)},
    )
    (folder / "tokenizer" / "tokenizer.pkl").write_bytes(pickle.dumps(encoding))
    torch.save(torch.ones(_VOCABULARY, dtype=torch.int32), folder / "tokenizer" / "token_bytes.pt")
    chance = random.Random(0)
    words = ["".join(chance.choices("abcdefgh", k=6)) for _ in range(1000)]
    texts = [" ".join(chance.choices(words, k=chance.randint(100, 3000))) for _ in range(800)]
    for i in range(2):
        path = folder / "base_data" / f"shard_{i:05d}.parquet"
        pyarrow.parquet.write_table(pyarrow.table({"text": texts}), path, row_group_size=50)


def simulated_ms(checkout: Path, layers: int) -> float:
    """A step of the script. UsageError if it does not run."""
    known = checkout / "nanochat" / "gpt.py"
    source = known.read_text(encoding="utf-8") if known.is_file() else ""
    if source.count(_NORM) != 1:
        raise UsageError(f"{checkout} is no checkout of nanochat at 348fbb3")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        shutil.copytree(checkout, folder / "nanochat", ignore=shutil.ignore_patterns(".git"))
        model = folder / "nanochat" / "nanochat" / "gpt.py"
        model.write_text(source.replace(_NORM, _NARROW), encoding="utf-8")
        make_data(folder / "base")
        command = ["-m", "scripts.base_train", "--gpu", "h100-sxm-80gb", "--nproc", "8", "--rank", "0"]
        command += ["--stand-in", "kernels", "--json", "--", f"--depth={layers}", *_OPTIONS.split()]
        environment = {"NANOCHAT_BASE_DIR": str(folder / "base"), "WANDB_MODE": "disabled"}
        return reported_ms(command, folder / "nanochat", environment)


def reported_ms(arguments: Sequence[str], folder: Path, environment: Mapping[str, str]) -> float:
    """The step of ``autosac run`` with these arguments, in this folder. UsageError if it fails."""
    paths = os.pathsep.join((str(Path.cwd()), os.environ.get("PYTHONPATH", "")))
    ended = subprocess.run(
        [sys.executable, "-m", "autosac", "run", *arguments],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": paths, **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    if ended.returncode:
        raise UsageError(ended.stderr.strip().rpartition("\n")[2])
    report = json.loads(ended.stdout[ended.stdout.index('{\n "job"') :])
    return float(report["step"]["step_ms"])


def run(options: argparse.Namespace) -> None:
    """Simulate the runs that were asked for and print them."""
    print(f"{'layers':<8} {'step (ms)':>10} {'tokens/s':>10} {'published':>10} {'error':>7}")
    for layers in options.layers or PUBLISHED:
        ms = simulated_ms(options.truth, layers)
        speed = 1e3 * TOKENS / ms
        print(
            f"{layers:<8} {ms:10.1f} {speed:10,.0f} {PUBLISHED[layers]:10,.0f} {speed / PUBLISHED[layers] - 1:+7.1%}",
            flush=True,
        )


def main() -> int:
    """Parse the arguments, run, and turn errors into a message and an exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.nanochat",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--truth", type=Path, required=True, help="checkout of nanochat at 348fbb3")
    parser.add_argument("--layers", type=int, choices=sorted(PUBLISHED), action="append", help="only this model")
    return exit_code(lambda: run(parser.parse_args()))


if __name__ == "__main__":
    sys.exit(main())
