"""A folder with valid inputs that are to be spoiled, and text that a terminal would obey."""

from __future__ import annotations

import gzip
import json
import os
import random
import socket
from pathlib import Path
from typing import Any

from benchmarks.bad_input import material
from benchmarks.bad_input.edits import Spoiled
from benchmarks.bad_input.material import GPU

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


def at(document: Any, path: tuple[str | int, ...]) -> Any:
    """The value at this path of a document."""
    for key in path:
        document = document[key]
    return document
