"""Options that several commands have, and the types of options' values."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from autosac.limits import parse_whole

_MOST_WATTS = 10_000
_DECIMAL = re.compile(r"[-+]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][-+]?[0-9]{1,4})?")


def add_command(commands: argparse._SubParsersAction[Any], name: str, what: str) -> Any:
    """A command. `what` it does stands in the list of commands, and as a sentence above the command's own options."""
    return commands.add_parser(name, help=what, description=f"{what[0].upper()}{what[1:]}.")


def add_output(command: argparse.ArgumentParser, *, debug: str = "show tracebacks") -> None:
    """How a command prints; `debug` is what --debug says of itself."""
    output = command.add_argument_group("output")
    output.add_argument("--json", action="store_true", help="print JSON")
    output.add_argument("--quiet", action="store_true", help="do not show progress")
    output.add_argument("--debug", action="store_true", help=debug)


def whole(least: int, most: int) -> Callable[[str], int]:
    """An option's type: a whole number within these bounds."""

    def parse(text: str) -> int:
        value = parse_whole(text, least, most)
        if value is None:
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from {least} to {most}")
        return value

    return parse


def decimal(text: str) -> float:
    """An option's type: a decimal number in ASCII. What it may be is said by who uses it; "nan" is a number here."""
    if text.lower() in ("nan", "inf", "+inf", "-inf", "infinity"):
        return float(text)
    if not _DECIMAL.fullmatch(text):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number")
    return float(text)


def watts(text: str) -> float:
    """An option's type: a power such as "500W" or "500"; from 1 to 10,000 watts."""
    number = text[:-1] if text[-1:] in ("W", "w") else text
    if not _DECIMAL.fullmatch(number) or not 1 <= float(number) <= _MOST_WATTS:
        raise argparse.ArgumentTypeError(f"{text!r} is not a power from 1W to {_MOST_WATTS}W")
    return float(number)


def filled(text: str) -> str:
    """An option's type: text that is not empty."""
    if not text.strip():
        raise argparse.ArgumentTypeError("it is empty")
    return text


def filled_path(text: str) -> Path:
    """An option's type: the path of a file."""
    return Path(filled(text))


def names(text: str) -> tuple[str, ...]:
    """An option's type: names with commas between them."""
    found = tuple(part.strip() for part in text.split(","))
    if not all(found):
        raise argparse.ArgumentTypeError(f"{text!r}: expected names separated by commas, none of them empty")
    return found
