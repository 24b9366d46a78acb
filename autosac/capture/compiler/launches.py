"""The program that Inductor writes for a graph, run on the simulated device.

The generated module allocates, frees and reuses its buffers, calls external kernels (products, attention, collectives) and
launches its Triton kernels. It runs as it is, except that

- its device is the simulated one;
- a Triton kernel is a `GeneratedKernel`, which records its launch: what it reads and writes, and how much work that is
  (`describe` writes this into the kernel's source);
- the kernel of flexible attention's template records this operator, with what it computes from (`describe_attention`);
- buffers are allocated and viewed through the dispatcher, where a capture sees them.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import re
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any
from unittest import mock

import torch
from torch._subclasses.fake_tensor import FakeTensor

from autosac.capture.compiler import symmetric
from autosac.capture.compiler.arithmetic import arithmetic
from autosac.capture.compiler.symmetric import into
from autosac.capture.device.device import device_type
from autosac.capture.device.masks import COMPUTED, share_of

_WORK = "# work: "
_ATTENTION = "# attention: "
_DEVICE = re.compile(r"(?<=type=')cuda(?=', index=0)|(?<=device=')cuda(?=')")
_OF_CUDA = re.compile(
    r"^.*_cuda_getCurrentRawStream.*$|torch\.cuda\.set_device\(0\)|torch\.cuda\._DeviceGuard\(0\)", re.M
)
_PARAMETERS = re.compile(r"^def \w+\(([^)]*)\)", re.M)
_ACCESS = re.compile(r"tl\.(?:load|store)\((\w+) \+ \((.*?)\), ")
_FACTORS = re.compile(r"(?:(\d+)\*\(*)?\b([rxyz]\d\w*)")
_LOOP = re.compile(r"^\s+for r\w+ in (?:tl\.)?range\(", re.M)
_WRITTEN = re.compile(r"^(in_)?out_ptr|^ws_ptr")


class GeneratedKernel:
    """One generated kernel."""

    def __init__(self, name: str, source: str) -> None:
        self._name = name
        parameters = _PARAMETERS.search(source)
        names = [part.split(":")[0].strip() for part in parameters.group(1).split(",")] if parameters else []
        self._written = tuple(i for i, parameter in enumerate(names) if _WRITTEN.match(parameter))
        found = re.search(f"^{_WORK}(.*)$", source, re.M)
        self._work = tuple(json.loads(found.group(1)).items()) if found else ()
        found = re.search(f"^{_ATTENTION}(.*)$", source, re.M)
        self._attention: dict[str, Any] = json.loads(found.group(1)) if found else {}
        self._positions = {name: i for i, name in enumerate(names)}

    def run(self, *arguments: Any, **_: Any) -> None:
        """Record a launch with these arguments, of which tensors come first."""
        tensors = [x for x in arguments if isinstance(x, FakeTensor)]
        if not tensors:
            return
        mode: Any = tensors[0].fake_mode
        if not self._attention:
            mode.log.triton_kernel(self._name, tensors, written=self._written, work=self._work)
            return

        def operands(role: str) -> tuple[torch.Tensor, ...]:
            return tuple(_view(arguments[self._positions[name]], *place) for name, *place in self._attention[role])

        operator = getattr(torch.ops.higher_order, self._attention["operator"])
        share = self._attention.get("share")
        masked = {} if share is None else {COMPUTED: share}
        mode.log.operator(operator, operands("reads"), masked, operands("writes"), None, None)


def describe(kernel: Any, source: str) -> str:
    """A kernel's source with its work: the bytes that it reads and writes, its rows, the elements of a reduced row, the loops
    that walk it, its instructions; "tiles" if it is pointwise and walks tiles of two dimensions, as it does where what is
    contiguous differs between what it reads and what it writes; what a reduction walks "across" its rows.
    """
    from torch._inductor.virtualized import V

    sizes = {name: int(V.graph.sizevars.optimization_hint(size)) for name, size in kernel.numels.items()}
    rows = reduced = 1
    for name, size in sizes.items():
        if name.startswith("r"):
            reduced *= size
        else:
            rows *= size
    nbytes = _traffic(kernel)
    loops = len(_LOOP.findall(source))
    work: dict[str, int | bool] = {"nbytes": nbytes, "rows": rows, "reduced": reduced, "loops": loops}
    if reduced == 1 and sum(size > 1 for size in sizes.values()) > 1:
        work["tiles"] = True
    if reduced > 1 and (across := _across(source, rows * reduced)):
        work["across"] = across
    instructions = arithmetic(source, sizes)._asdict()
    if not instructions["atomic"]:
        del instructions["atomic"]
    work |= instructions
    return f"{source.rstrip()}\n{_WORK}{json.dumps(work)}\n"


def _traffic(kernel: Any) -> int:
    """The bytes that a kernel reads and writes, as Inductor counts them for its own benchmarks, of all its buffers.

    The scheduler has another name for a buffer after each change in place (a collective that fills it, the wait for that),
    and Inductor does not count what a kernel reads under such a name.
    """
    from torch._inductor.virtualized import V

    names = V.graph.scheduler.mutation_real_name
    accesses: dict[str, list[Any]] = {}
    for name, found in kernel.features.buf_accesses().items():
        for known in {name, names.get(name, name)}:
            accesses.setdefault(known, []).extend(found)
    with mock.patch.object(kernel.features, "buf_accesses", lambda: accesses):
        return int(kernel.estimate_kernel_num_bytes())


def _across(source: str, elements: int) -> int:
    """Elements that a reduction reads and writes in the rarer of its two directions: where neighbours lie side by side in a
    column, if most tensors are walked along their rows, or the reverse. `elements`: those of its rows.
    """
    walks = [(tensor, _FACTORS.findall(index)) for tensor, index in _ACCESS.findall(source)]
    walks = [(tensor, found) for tensor, found in walks if any(name[0] == "r" for _, name in found)]
    places = [{name for _, name in found if name[0] != "r"} for _, found in walks]
    rows = max(map(len, places), default=0)  # parts of a row's number: what uses fewer is smaller than the rows
    along, across = set[str](), set[str]()
    for (tensor, found), place in zip(walks, places, strict=True):
        if len(place) == rows > 0 and (beside := {name[0] for factor, name in found if not factor}):
            (along if "r" in beside else across).add(tensor)
    return elements * min(len(along), len(across))


def describe_attention(kernel: Any, source: str) -> str:
    """The source of a template's kernel with the operator, if it is flexible attention: its operands, each a parameter of the
    kernel (which views of one buffer share) with the size, stride and offset of the view.
    """
    nodes = getattr(kernel, "named_input_nodes", {})
    if not {"Q", "K", "V"} <= nodes.keys():
        return source
    is_backward = "DO" in nodes
    result, buffers = kernel.output_node, kernel.args.input_buffers
    operands = {name: [buffers[n.get_name()], *_place(n)] for name, n in nodes.items() if n.get_name() in buffers}
    written = [operands.pop(name) for name in (("DQ", "DV") if is_backward else ("LSE", "MAX")) if name in operands]
    written.append([kernel.args.output_buffers[result.get_name()], *_place(result)])
    shares = (share_of(node.target, node.args) for node in result.origins)
    described = {
        "operator": "flex_attention_backward" if is_backward else "flex_attention",
        "share": next((share for share in shares if share is not None), None),
        "reads": list(operands.values()),
        "writes": written,
    }
    return f"{_ATTENTION}{json.dumps(described)}\n{source}"


def _place(node: Any) -> tuple[list[int], list[int], int]:
    """Size, stride and offset of a view of a buffer."""
    from torch._inductor.virtualized import V

    layout = node.get_layout()
    of = V.graph.sizevars.optimization_hint
    return [int(of(n)) for n in layout.size], [int(of(n)) for n in layout.stride], int(of(layout.offset))


class _Extern:
    """In the place of ``extern_kernels``: products and the like that write into buffers made before."""

    def __init__(self, kernels: Any) -> None:
        self._kernels = kernels

    def __getattr__(self, name: str) -> Any:
        """The kernel called `name`; that of an operator is recorded as this operator, with the buffer as its result."""
        kernel, packet = getattr(self._kernels, name), getattr(torch.ops.aten, name, None)
        if packet is None:
            return kernel

        def call(*args: Any, out: Any = None, **kwargs: Any) -> Any:
            if isinstance(out, FakeTensor):
                return into(packet)(*args, **kwargs, out=out)
            return kernel(*args, **kwargs) if out is None else kernel(*args, **kwargs, out=out)

        return call


class _NoKernel:
    """A kernel for the host: the simulated step does not run it."""

    def __call__(self, *_: Any) -> None:
        pass


def _view(x: torch.Tensor, size: Any, stride: Any, offset: int = 0) -> torch.Tensor:
    if not isinstance(x, FakeTensor):
        return x.as_strided(size, stride, x.storage_offset() + offset)
    mode: Any = x.fake_mode
    with mode.unrecorded():
        return x.as_strided(size, stride, x.storage_offset() + offset)


def _empty(size: Any, stride: Any, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty_strided(size, stride, dtype=dtype, device=device_type())


def _unloaded(source: str, *_: Any, **__: Any) -> ModuleType:
    """A choice of a template's kernel, which is loaded to be timed: nothing is timed here."""
    module = ModuleType("choice")
    vars(module).update(__file__=os.devnull, key=str(len(source)))
    return module


class _Modules:
    """In the place of Inductor's cache of modules on disk: they live in memory."""

    def __init__(self) -> None:
        self._sources: dict[str, str] = {}
        self._loaded: list[tuple[str, bool]] = []

    def only_text(self) -> str | None:
        """The text of the module that was loaded, if it was one and is all there is to it."""
        return self._loaded[0][0] if len(self._loaded) == 1 and self._loaded[0][1] else None

    def run(self, text: str) -> Callable[[list[Any]], Any]:
        """What a module of this text is called as."""
        program: Callable[[list[Any]], Any] = self.load(self.write(text)[0], os.devnull).call
        return program

    def write(self, source: str, *_: Any, **__: Any) -> tuple[str, str]:
        key = str(len(self._sources))
        self._sources[key] = source
        return key, os.devnull

    def load(self, key: str, path: str, linemap: Any = None, attrs: dict[str, Any] | None = None) -> ModuleType:
        text = self._sources.pop(key)
        self._loaded.append((text, not attrs))
        source = _DEVICE.sub(device_type(), text)
        source = _OF_CUDA.sub(lambda found: "no_guard()" if "Guard" in found.group() else "pass", source)
        source = source.replace("torch.ops.symm_mem.", "symmetric_operators.")
        module = ModuleType("generated")
        vars(module).update(__file__=path, get_raw_stream=int, no_guard=contextlib.nullcontext)
        exec(compile(source, "<generated by Inductor>", "exec"), vars(module))
        vars(module).update(reinterpret_tensor=_view, empty_strided_cuda=_empty, **(attrs or {}))
        vars(module).update(extern_kernels=_Extern(vars(module).get("extern_kernels")))
        vars(module).update(symmetric_operators=symmetric.OPERATORS)
        return module


@contextlib.contextmanager
def recorded() -> Iterator[_Modules]:
    """While this is entered, the modules that Inductor makes are those of this module's docstring."""
    from torch._inductor.async_compile import AsyncCompile
    from torch._inductor.codecache import PyCodeCache
    from torch._inductor.codegen.triton import TritonKernel, TritonScheduling

    modules = _Modules()
    generate = TritonKernel.codegen_kernel
    define: Any = TritonScheduling.define_kernel

    @functools.wraps(generate)
    def codegen_kernel(self: Any, *args: Any, **kwargs: Any) -> str:
        return describe(self, generate(self, *args, **kwargs))

    @functools.wraps(define)
    def define_kernel(self: Any, source: str, schedule: Any, kernel: Any) -> Any:
        return define(self, describe_attention(kernel, source), schedule, kernel)

    def triton(_: Any, name: str, source: str, *__: Any, **___: Any) -> GeneratedKernel:
        return GeneratedKernel(name, source)

    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(TritonKernel, "codegen_kernel", codegen_kernel))
        stack.enter_context(mock.patch.object(PyCodeCache, "write", modules.write))
        stack.enter_context(mock.patch.object(PyCodeCache, "load_by_key_path", modules.load))
        stack.enter_context(mock.patch.object(PyCodeCache, "load", _unloaded))
        stack.enter_context(mock.patch.object(TritonScheduling, "define_kernel", define_kernel))
        stack.enter_context(mock.patch.object(AsyncCompile, "triton", triton))
        for name in ("cpp", "cpp_pybinding"):
            stack.enter_context(mock.patch.object(AsyncCompile, name, lambda *_, **__: _NoKernel()))
        yield modules
