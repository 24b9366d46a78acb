"""Checkpoints in the formats of libraries, which are not written: safetensors, torch.distributed.checkpoint, Megatron-Core.

What a script loads again, because it has saved it before, is like what it saved: numbers are those that it saved, tensors have
no values anyway.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

from autosac.capture.patches.after_import import after_import
from autosac.capture.patches.saved import contents_of, loaded_from
from autosac.capture.patches.unwritten import UnwrittenFiles

_DCP, _MEGATRON = ".metadata", "metadata.json"
_TENSORS, _METADATA = "tensors", "metadata"  # of what is saved as safetensors


class LibraryCheckpoints:
    """`saved` is told of each checkpoint that is not written."""

    def __init__(self, unwritten: UnwrittenFiles, saved: Callable[[], None]) -> None:
        self._unwritten = unwritten
        self._saved = saved

    def install(self) -> None:
        """In place of the libraries' own functions, if they are imported."""
        after_import("safetensors", self._opened_safetensors)
        after_import("safetensors.torch", self._safetensors)
        after_import("torch.distributed.checkpoint.state_dict_saver", self._distributed_saver)
        after_import("torch.distributed.checkpoint.state_dict_loader", self._distributed_loader)
        after_import("megatron.core.dist_checkpointing.serialization", self._megatron)

    def _write(self, place: Any, contents: Any) -> None:
        self._saved()
        self._unwritten.write(place, *contents_of(contents))

    # ---- safetensors ------------------------------------------------------------------------------------------------

    def _safetensors(self, module: Any) -> None:
        read = module.load_file

        def save_file(tensors: Any, filename: Any, metadata: Any = None, *_: Any, **__: Any) -> None:
            self._write(filename, {_TENSORS: dict(tensors), _METADATA: metadata})

        def save_model(model: torch.nn.Module, filename: Any, metadata: Any = None, *_: Any, **__: Any) -> None:
            save_file(model.state_dict(), filename, metadata)

        @functools.wraps(read)
        def load_file(filename: Any, device: Any = "cpu", **options: Any) -> Any:
            contents = self._unwritten.get(filename)
            if contents is None:
                return read(filename, device, **options)
            return loaded_from(contents[_TENSORS], lambda _: torch.device(device))

        vars(module).update(save_file=save_file, save_model=save_model, load_file=load_file)

    def _opened_safetensors(self, module: Any) -> None:
        original = module.safe_open

        @functools.wraps(original)
        def safe_open(filename: Any, framework: Any, device: Any = "cpu", **options: Any) -> Any:
            contents = self._unwritten.get(filename)
            if contents is None:
                return original(filename, framework, device, **options)
            return OpenedSafetensors(contents, torch.device(device))

        vars(module)["safe_open"] = safe_open

    # ---- torch.distributed.checkpoint -------------------------------------------------------------------------------

    def _distributed_saver(self, module: Any) -> None:
        def save(state_dict: Any, *, checkpoint_id: Any = None, storage_writer: Any = None, **_: Any) -> None:
            place = _folder(checkpoint_id, storage_writer)
            states = {key: _state(value) for key, value in state_dict.items()}
            if place is None:  # a writer of the script's own, which has no place
                self._saved()
            else:
                self._write(Path(place, _DCP), _numbers(states))

        def async_save(state_dict: Any, **options: Any) -> Future[None]:
            save(state_dict, **{key: options[key] for key in ("checkpoint_id", "storage_writer") if key in options})
            done: Future[None] = Future()
            done.set_result(None)
            return done

        vars(module).update(save=save, async_save=async_save)

    def _distributed_loader(self, module: Any) -> None:
        original = module.load

        @functools.wraps(original)
        def load(state_dict: Any, *, checkpoint_id: Any = None, storage_reader: Any = None, **options: Any) -> None:
            place = _folder(checkpoint_id, storage_reader)
            contents = self._unwritten.get(Path(place, _DCP)) if place is not None else None
            if contents is None:
                original(state_dict, checkpoint_id=checkpoint_id, storage_reader=storage_reader, **options)
                return
            for key, value in list(state_dict.items()):
                if key not in contents:
                    continue
                found = _filled(_state(value), contents[key])
                if hasattr(value, "load_state_dict"):
                    value.load_state_dict(found)
                else:
                    state_dict[key] = found

        vars(module)["load"] = load

    # ---- Megatron-Core ----------------------------------------------------------------------------------------------

    def _megatron(self, module: Any) -> None:
        original = module.load

        def save(sharded_state_dict: Any, checkpoint_dir: Any, *_: Any, **__: Any) -> None:
            self._write(Path(checkpoint_dir, _MEGATRON), _numbers(sharded_state_dict))

        @functools.wraps(original)
        def load(sharded_state_dict: Any, checkpoint_dir: Any, *args: Any, **kwargs: Any) -> Any:
            contents = self._unwritten.get(Path(checkpoint_dir, _MEGATRON))
            if contents is None:
                return original(sharded_state_dict, checkpoint_dir, *args, **kwargs)
            return {**contents, **_filled(_unsharded(sharded_state_dict), contents)}

        vars(module).update(save=save, load=load)


class OpenedSafetensors:
    """What `safetensors.safe_open` returns."""

    def __init__(self, contents: Any, device: torch.device) -> None:
        self._contents = contents
        self._device = device

    def __enter__(self) -> OpenedSafetensors:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def keys(self) -> list[str]:
        """The names of its tensors, sorted as in a file."""
        return sorted(self._contents[_TENSORS])

    offset_keys = keys

    def metadata(self) -> dict[str, str] | None:
        """What was saved beside the tensors."""
        found: dict[str, str] | None = self._contents[_METADATA]
        return found

    def get_tensor(self, name: str) -> Any:
        """A tensor like the one that was saved."""
        return loaded_from(self._contents[_TENSORS][name], lambda _: self._device)

    def get_slice(self, name: str) -> SavedSlice:
        """Of which parts can be read."""
        return SavedSlice(self._contents[_TENSORS][name], lambda: self.get_tensor(name))


class SavedSlice:
    """A tensor of an opened file, which is not read before it is indexed."""

    def __init__(self, saved: Any, read: Callable[[], Any]) -> None:
        self._saved = saved
        self._read = read

    def get_shape(self) -> list[int]:
        """Of the whole tensor."""
        return list(self._saved.shape)

    def get_dtype(self) -> str:
        """As safetensors call it: F32, BF16, ..."""
        types: dict[str, torch.dtype] = getattr(sys.modules.get("safetensors.torch"), "_TYPES", {})
        return next((name for name, dtype in types.items() if dtype == self._saved.dtype), str(self._saved.dtype))

    def __getitem__(self, index: Any) -> Any:
        return self._read()[index]


def _folder(checkpoint_id: Any, storage: Any) -> str | None:
    for place in (checkpoint_id, getattr(storage, "checkpoint_id", None), getattr(storage, "path", None)):
        if isinstance(place, (str, os.PathLike)) and os.fspath(place):
            return os.fspath(place)
    return None


def _state(value: Any) -> Any:
    return value.state_dict() if hasattr(value, "load_state_dict") else value


def _is_number(value: Any) -> bool:
    """Whether it is saved as it is: not what stands for a tensor, or a part of one."""
    return isinstance(value, (bool, int, float, str, bytes, type(None)))


def _numbers(tree: Any) -> Any:
    """The numbers in a tree, in their places."""
    if isinstance(tree, dict):
        found = {key: _numbers(value) for key, value in tree.items()}
        return {key: value for key, value in found.items() if value is not _nothing}
    if isinstance(tree, (list, tuple)):
        return [None if (found := _numbers(value)) is _nothing else found for value in tree]
    return tree if _is_number(tree) else _nothing


def _filled(tree: Any, saved: Any) -> Any:
    """A tree with the numbers that were saved in its places."""
    if isinstance(tree, dict) and isinstance(saved, dict):
        return {key: _filled(value, saved[key]) if key in saved else value for key, value in tree.items()}
    if isinstance(tree, (list, tuple)) and isinstance(saved, (list, tuple)) and len(tree) == len(saved):
        return type(tree)(_filled(value, one) for value, one in zip(tree, saved, strict=True))
    return saved if _is_number(tree) and _is_number(saved) else tree


def _unsharded(tree: Any) -> Any:
    """Megatron-Core's descriptions of parts, each by what it describes."""
    if isinstance(tree, dict):
        return {key: _unsharded(value) for key, value in tree.items()}
    if isinstance(tree, (list, tuple)):
        return type(tree)(_unsharded(value) for value in tree)
    if isinstance(tree, FakeTensor) or _is_number(tree):
        return tree
    return tree.unwrap() if hasattr(tree, "unwrap") else getattr(tree, "data", tree)


_nothing = object()
