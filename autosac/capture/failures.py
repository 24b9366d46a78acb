"""Why a job could not be captured, in one line."""

from __future__ import annotations

import os
import re
import signal
import sys
import traceback
from collections.abc import Iterator

from autosac.capture.device.sources import innermost_line, raised_in
from autosac.errors import AutosacError, CaptureError

_LIMIT = 400  # characters of a message
# How an error of a step begins: the job could be built.
IN_A_STEP = "training step"

_SPARSE = (
    "sparse tensors cannot be simulated: plan the model with dense ones (Embedding and EmbeddingBag with sparse=True make "
    "sparse gradients)"
)
_TWO_DEVICES = (
    "the step mixes tensors of the host with tensors of the simulated GPU: build all of them on the device that make_step is "
    "called with (torch.cuda.is_available() is False while a step is captured)"
)
_MISMATCH = "encountered during backward but not found in storage"
# What to do about errors whose own messages do not help, by a part of the message.
_REMEDIES = {
    "two devices, cpu and simcuda": _TWO_DEVICES,
    "two devices, simcuda:0 and cpu": _TWO_DEVICES,
    "is shared with a parameter already managed by another FSDP group": (
        "the model ties parameters of different FSDP units, as an embedding and its output layer, and this torch cannot shard "
        "them, in the real job either: use tensor parallelism (parallelism.tensor_parallel_degree = 2) or DDP "
        "(data_parallel_shard_degree = 1 and data_parallel_replicate_degree = the number of GPUs), or a flavor without tied "
        "embeddings"
    ),
    "'fsdp']' is not available": (
        "TorchTitan shards a model whose experts are spread over GPUs by FSDP, which has one GPU here, in the real job too: "
        "make data_parallel_shard_degree or context_parallel_degree larger than 1, or expert_parallel_degree 1"
    ),
    "in sdpa_input_fn": (
        "attention gets tensors of tensor parallelism, which context parallelism does not take, in the real job either: make "
        "tensor_parallel_degree or context_parallel_degree 1"
    ),
    "Cannot access storage of SparseTensorImpl": _SPARSE,
    "their sizes and times depend on their values": _SPARSE,
    "memory format option is only supported by strided tensors": _SPARSE,
    "aten::_to_sparse": _SPARSE,
    "DynamicOutputShapeException": (
        "the size of a result depends on values of simulated tensors, which are not known: bring them from the host, or "
        "give the size itself"
    ),
    "_nested_tensor_from": ("nested tensors with strided layout cannot be simulated: give them layout=torch.jagged"),
    "Cannot access storage of TensorWrapper": (
        "function transforms (torch.func: grad, vmap, jvp) cannot be simulated: plan the model with an ordinary backward"
    ),
    "version_counter for inference tensor": (
        "inference tensors (torch.inference_mode inside the step) cannot be simulated: use torch.no_grad() in its place"
    ),
    "is not supported for tensor subclasses": (
        "the step reads the elements of a tensor through numpy, and simulated tensors have none: compute it with PyTorch"
    ),
    "its data is not allocated yet": (
        "the step passes the memory of a tensor to code outside PyTorch (an extension, a real process group), and "
        "simulated tensors have none: leave that out of the captured step"
    ),
    "tensors_saved_with_vc_check": (
        "this torch ({torch}) cannot train the job: its compiler fails on modules that are checkpointed under tensor "
        "parallelism, in the real job too; use torch 2.11 or 2.14.1, or a plan of AutoSAC, which leaves the layers to the "
        "compiler"
    ),
    "Set torch._functorch.config.unsafe_treat_script_objects_as_zero_size": (
        "this torch ({torch}) cannot train the job: its partitioner takes no memory budget under tensor parallelism, where it "
        "does not know the size of device meshes, in the real job too; use a plan of AutoSAC, or set "
        "torch._functorch.config.unsafe_treat_script_objects_as_zero_size to True"
    ),
    _MISMATCH: (
        "this torch ({torch}) cannot train the job: in a module that it checkpoints selectively, the recomputation runs "
        "operators that the forward did not run (FSDP gathers elsewhere, if the module is one of its units), in the real job "
        "too; checkpoint whole layers (mode full, or every n-th layer), or use a plan of AutoSAC"
    ),
    "compiled with non-empty donated buffers": (
        "a compiled backward reuses the memory of what it has saved (donated buffers), and its graph is kept, as schedules of "
        "pipelines do that split the backward (zero bubble, DualPipeV): PyTorch refuses that in the real job too; take a "
        "schedule such as 1F1B or Interleaved1F1B, do not compile, or set torch._functorch.config.donated_buffer to False"
    ),
    "'CondOp' object has no attribute": (
        "torch.cond chooses a branch by the value of a simulated tensor, which is not known: choose it on the host"
    ),
    "DataDependentOutputException": (
        "the step checks the values of tensors, and simulated tensors have none: leave the check out"
    ),
}
_ADDRESS = re.compile(r" at 0x[0-9a-f]+(?=>)")
_SHAPELESS = re.compile(r"(\S+): attempted to run this operator with Meta tensors")


def one_line(error: BaseException) -> str:
    """An error's message without line breaks and addresses of objects, the same in every process; its type if it has none."""
    return _ADDRESS.sub("", " ".join(str(error).split())) or type(error).__name__


def capture_error(error: BaseException, doing: str) -> AutosacError:
    """A CaptureError that names the call in the user's or model's code where capture failed, and what to do.

    An AutosacError is its own explanation, also where Dynamo has wrapped it (``inner_exception``). With AUTOSAC_DEBUG=1 in the
    environment the traceback is printed, too.
    """
    if os.environ.get("AUTOSAC_DEBUG") == "1":
        traceback.print_exception(error)
    if isinstance(error, AutosacError):
        return error
    wrapped = getattr(error, "inner_exception", None)
    if isinstance(wrapped, AutosacError):  # torch.fx adds paragraphs on what was being executed
        return type(wrapped)(str(wrapped).partition("\n\n")[0])
    where = innermost_line(error.__traceback__)
    said = "".join(f"{type(e).__name__}: {e}\n" if str(e) else _message_of(e, _LIMIT) for e in _chain(error))
    part = next((part for part in _REMEDIES if part in said), None)
    if part is None and any(map(_recomputes_selectively, _chain(error))):
        part = _MISMATCH  # a saved result of another operator was taken for the one that fails
    if part is not None:
        version = str(getattr(sys.modules.get("torch"), "__version__", ""))
        return CaptureError(f"{doing}: {remedy_of(part, version)} (at {where})")
    shapeless = _SHAPELESS.search(said)
    if shapeless:
        return CaptureError(
            f"{doing}: PyTorch does not know the shapes of {shapeless[1]}'s results: give it a shape function "
            f"(torch.library.register_fake) (at {where})"
        )
    root: BaseException = error
    while root.__cause__ is not None:
        root = root.__cause__
    message = (
        _message_of(error, _LIMIT)
        if root is error
        else f"{_message_of(error, _LIMIT // 2)}, because of {_message_of(root, _LIMIT // 2)}"
    )
    return CaptureError(f"{doing}: {message} (at {where}; --debug or AUTOSAC_DEBUG=1 shows the whole traceback)")


def _chain(error: BaseException) -> Iterator[BaseException]:
    """The error, and those that were handled when it was raised."""
    present: BaseException | None = error
    while present is not None:
        yield present
        present = present.__context__


def _recomputes_selectively(error: BaseException) -> bool:
    """Whether it was raised while PyTorch's selective checkpointing recomputed a module."""
    modes = [
        frame.f_locals.get("recompute_context")
        for frame, _ in traceback.walk_tb(error.__traceback__)
        if frame.f_code.co_name == "recompute_fn"
    ]
    return any(type(mode).__name__ == "_CachedTorchDispatchMode" for mode in modes)


def remedy_of(part: str, torch_version: str) -> str:
    """What to do about errors whose text has this part."""
    return _REMEDIES[part].replace("{torch}", torch_version)


def _message_of(error: BaseException, limit: int) -> str:
    """Its type and message on one line; without a message, the function that raised it."""
    message = one_line(error)
    if len(message) > limit:
        message = message[: limit - 3] + "..."
    kind = type(error).__name__
    return f"{kind}{raised_in(error.__traceback__)}" if message == kind else f"{kind}: {message}"


def how_it_ended(code: int) -> str:
    """What an exit code (minus the signal's number) of a process says, as the end of a sentence."""
    if code >= 0:
        return f"ended early with exit code {code}"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = "unknown"
    hint = (
        ": Linux does that when memory runs out; close other programs, or use a machine with more memory"
        if -code == signal.SIGKILL
        else ""
    )
    return f"was ended by signal {-code} ({name}){hint}"
