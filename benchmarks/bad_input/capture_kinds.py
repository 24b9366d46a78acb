"""The kinds of malformed captures, each a function that makes a trial."""

from __future__ import annotations

import gzip
import json
import random
from typing import Any

from benchmarks.bad_input import material
from benchmarks.bad_input.edits import Spoiled, edit_bytes, edit_json, leaves, put
from benchmarks.bad_input.material import GPU
from benchmarks.bad_input.trials import Trial
from benchmarks.bad_input.workshop import HOSTILE, Workshop, at


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
    numbers = [p for p in leaves(document) if type(at(document, p)) is int and p[0] != "schema"]
    changed = []
    for _ in range(rng.randrange(1, 4)):
        path = rng.choice(numbers)
        new = rng.choice((0, 1, 2, 3, 5, -1, 2**20, 2**40, at(document, rng.choice(numbers))))
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
