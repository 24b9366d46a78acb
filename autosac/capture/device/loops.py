"""Loops of scripts whose conditions nobody knows: ``while (halted < 0.95).any(): ...`` runs once.

What an unknown condition is, is no secret elsewhere: it does not hold. A loop that asks would then not begin, and what it
computes (all of a network's layers, in one of adaptive depth) would be missing; if it held, the loop would not end. So a
condition of a ``while`` begins its loop when it is asked first, and ends it when it is asked again. Of a loop that may be left
in another way (``break``, ``return``) nobody knows whether it is asked first: it does not begin.
"""

from __future__ import annotations

import ast
import linecache
from functools import cache
from types import CodeType, FrameType

Span = tuple[int, int, int, int]
"""First line and column, last line and column."""

_begun: set[tuple[int, Span]] = set()  # frames and their conditions: loops that have begun


def answer(frame: FrameType | None) -> bool | None:
    """What an unknown condition is that this frame asks for; None if it is not about a loop."""
    if frame is None:
        return None
    found = _condition(frame.f_code, frame.f_lasti)
    if found is None:
        return None
    loop, begins = found
    key = id(frame), loop
    if key in _begun:
        _begun.remove(key)
        return not begins
    _begun.add(key)
    return begins


@cache
def _condition(code: CodeType, instruction: int) -> tuple[Span, bool] | None:
    """The condition of a ``while`` in which this instruction is, and with which value of it the loop goes on."""
    line, end_line, column, end_column = list(code.co_positions())[instruction // 2]
    if line is None or end_line is None or column is None or end_column is None:
        return None
    asked = (line, column, end_line, end_column)
    for loop in _loops(code.co_filename):
        if asked == _span(loop):  # what a jump asks, after the whole condition or its first part
            return asked, _negations(loop.test, None) % 2 == 0
        if _covers(loop.test, asked):
            return _span(loop), _negations(loop.test, asked) % 2 == 0
    return None


def _negations(condition: ast.expr, asked: Span | None) -> int:
    """How often what is asked is negated in a condition. `asked`: where it stands; None: it is the first part."""
    if asked is None:
        node, found = condition, 0
        while isinstance(node, (ast.BoolOp, ast.UnaryOp)):
            found += isinstance(node, ast.UnaryOp)
            node = node.values[0] if isinstance(node, ast.BoolOp) else node.operand
        return found
    inside = (node for node in ast.walk(condition) if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not))
    return sum(_covers(node.operand, asked) for node in inside)


@cache
def _loops(filename: str) -> tuple[ast.While, ...]:
    try:
        tree = ast.parse("".join(linecache.getlines(filename)))
    except (SyntaxError, ValueError):
        return ()
    return tuple(node for node in ast.walk(tree) if isinstance(node, ast.While) and not _may_be_left(node))


def _may_be_left(loop: ast.While) -> bool:
    return any(isinstance(node, ast.Break | ast.Return) for statement in loop.body for node in ast.walk(statement))


def _span(node: ast.expr | ast.stmt) -> Span:
    return node.lineno, node.col_offset, node.end_lineno or node.lineno, node.end_col_offset or node.col_offset


def _covers(node: ast.expr, asked: Span) -> bool:
    first, last = _span(node)[:2], _span(node)[2:]
    return first <= asked[:2] and asked[2:] <= last
