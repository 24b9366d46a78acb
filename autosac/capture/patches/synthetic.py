"""Made-up data sets and tokenizers in place of those that would have to be downloaded; only where a user asks for it.

`datasets.load_dataset`, the tokenizers' `from_pretrained`, tiktoken's encodings and torchvision's data sets do what they can
without the network first.
"""

from __future__ import annotations

import functools
import itertools
import os
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from autosac.capture.patches.after_import import after_import
from autosac.errors import UsageError

ROWS = 1000
LONGEST_TOKENS = 1024
_WORDS_OF_A_TEXT = 400
_WORDS = ("the", "of", "training", "model", "and", "a", "memory", "to", "step", "in", "time", "is", "layer", "it")
_SPECIAL = ("<unk>", "<s>", "</s>", "<pad>", "<mask>", "<cls>", "<sep>")
_SPLITS = ("train", "validation", "test")
# torchvision's data sets of images in memory: shape of an image as it is kept, and classes.
_IN_MEMORY: Mapping[str, tuple[tuple[int, ...], int]] = {
    "MNIST": ((28, 28), 10),
    "FashionMNIST": ((28, 28), 10),
    "KMNIST": ((28, 28), 10),
    "EMNIST": ((28, 28), 47),
    "CIFAR10": ((32, 32, 3), 10),
    "CIFAR100": ((32, 32, 3), 100),
    "SVHN": ((3, 32, 32), 10),
    "STL10": ((3, 96, 96), 10),
}
_OF_TENSORS = ("MNIST", "FashionMNIST", "KMNIST", "EMNIST")  # the others hold arrays
_OF_LABELS = ("SVHN", "STL10")  # `labels`, not `targets`
_IN_FILES = ("ImageFolder", "ImageNet")
_CLASSES_IN_FILES = 1000
_FILE_SIZE = (375, 500, 3)  # what most images of ImageNet have
# Tokens of tiktoken's files, without special ones.
_RANKS: Mapping[str, int] = {
    "vocab.bpe": 50256,
    "r50k_base": 50256,
    "cl100k_base": 100256,
    "o200k_base": 199998,
}


def columns_of(text: str) -> dict[str, str]:
    """Kinds of columns by name: ``text,label:2,image:224x224``; a number is of classes. UsageError for all else."""
    found = {}
    for part in text.split(","):
        name, _, kind = part.strip().partition(":")
        sizes = kind.split("x")
        if not name or (kind and not all(size.isdigit() and int(size) > 0 for size in sizes)) or len(sizes) > 2:
            raise UsageError(
                f"--synthetic-data {text}: {part!r} is not a column: expected NAME, NAME:CLASSES or NAME:HxW"
            )
        found[name] = kind
    return found


def install(columns: Mapping[str, str], note: Callable[[str], None]) -> None:
    """`note` receives what was invented."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    after_import("datasets", functools.partial(_data_sets, columns=columns, note=note))
    after_import("torchvision.datasets", functools.partial(_images, note=note))
    after_import("tiktoken.load", functools.partial(made_up_encodings, note=note))
    for module, name in (
        ("transformers.tokenization_utils_base", "PreTrainedTokenizerBase"),
        ("transformers.models.auto.tokenization_auto", "AutoTokenizer"),
    ):
        after_import(module, functools.partial(_tokenizers, name=name, note=note))


def _data_sets(module: Any, columns: Mapping[str, str], note: Callable[[str], None]) -> None:
    original = module.load_dataset

    @functools.wraps(original)
    def load_dataset(path: str, *args: Any, split: Any = None, streaming: bool = False, **kwargs: Any) -> Any:
        try:
            return original(path, *args, split=split, streaming=streaming, **kwargs)
        except (OSError, ValueError):  # its errors for what is neither here nor reachable
            note(f"the data set {path} is made up: {ROWS} rows of {', '.join(columns)} (--synthetic-data)")
        made = module.Dataset.from_dict({name: _column(kind) for name, kind in columns.items()})
        made = made.to_iterable_dataset() if streaming else made
        return made if split is not None else module.DatasetDict(dict.fromkeys(_SPLITS, made))

    module.load_dataset = load_dataset


def _images(module: Any, note: Callable[[str], None]) -> None:
    """Make data sets of torchvision up if their files are missing and cannot be downloaded."""
    for name, fill in (*((name, _in_memory) for name in _IN_MEMORY), *((name, _in_files) for name in _IN_FILES)):
        owner = getattr(module, name)
        if "__init__" in vars(owner):  # the others inherit one that is replaced
            owner.__init__ = _made_up(owner.__init__, fill, note)


def _made_up(original: Any, fill: Callable[[Any], None], note: Callable[[str], None]) -> Any:
    @functools.wraps(original)
    def init(self: Any, root: Any, *args: Any, **kwargs: Any) -> None:
        try:
            original(self, root, *args, **kwargs)
        except (OSError, RuntimeError):  # its errors for missing files and failed downloads
            if not hasattr(self, "transforms"):  # it failed before its base was set up
                base: Any = next(c for c in type(self).__mro__ if c.__name__ == "VisionDataset")
                given: dict[str, Any] = {
                    name: kwargs[name] for name in ("transform", "target_transform") if name in kwargs
                }
                if args and callable(args[0]):
                    given["transform"] = args[0]
                base.__init__(self, root, **given)
            fill(self)
            note(f"the data set {type(self).__name__} is made up: {ROWS} images (--synthetic-data)")

    return init


def _in_memory(data_set: Any) -> None:
    import torch

    kind = next(c.__name__ for c in type(data_set).__mro__ if c.__name__ in _IN_MEMORY)
    shape, classes = _IN_MEMORY[kind]
    random = np.random.default_rng(0)
    pixels = random.integers(0, 256, (ROWS, *shape), dtype=np.uint8)
    labels = random.integers(0, classes, ROWS)
    data_set.data = torch.from_numpy(pixels) if kind in _OF_TENSORS else pixels
    if kind in _OF_TENSORS:
        data_set.targets = torch.from_numpy(labels)
    else:
        setattr(data_set, "labels" if kind in _OF_LABELS else "targets", labels.tolist())
    if "classes" not in dir(data_set):
        data_set.classes = [str(i) for i in range(classes)]


def _in_files(data_set: Any) -> None:
    from PIL import Image

    random = np.random.default_rng(0)
    image = Image.fromarray(random.integers(0, 256, _FILE_SIZE, dtype=np.uint8))
    data_set.loader = lambda _: image
    data_set.classes = [str(i) for i in range(_CLASSES_IN_FILES)]
    data_set.class_to_idx = {name: i for i, name in enumerate(data_set.classes)}
    labels = random.integers(0, _CLASSES_IN_FILES, ROWS).tolist()
    data_set.samples = data_set.imgs = [(f"{i}.jpeg", label) for i, label in enumerate(labels)]
    data_set.targets = labels


def _column(kind: str) -> list[Any]:
    random = np.random.default_rng(0)
    if not kind:
        return [" ".join(random.choice(_WORDS, _WORDS_OF_A_TEXT)) for _ in range(ROWS)]
    sizes = [int(size) for size in kind.split("x")]
    if len(sizes) == 1:
        return [int(label) for label in random.integers(0, sizes[0], ROWS)]
    from PIL import Image

    image = Image.fromarray(random.integers(0, 256, (*sizes, 3), dtype=np.uint8))
    return [image] * ROWS


def _tokenizers(module: Any, name: str, note: Callable[[str], None]) -> None:
    owner = getattr(module, name)
    original = owner.from_pretrained.__func__

    @functools.wraps(original)
    def from_pretrained(cls: Any, path: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return original(cls, path, *args, **kwargs)
        except (OSError, ValueError):
            note(f"the tokenizer {path} is made up: a token for each byte (--synthetic-data)")
            return _tokenizer()

    owner.from_pretrained = classmethod(from_pretrained)


def _tokenizer() -> Any:
    """A token for each byte, and the usual special ones."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    names = [*_SPECIAL, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    bytewise = Tokenizer(models.BPE({name: i for i, name in enumerate(names)}, [], unk_token=_SPECIAL[0]))
    bytewise.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bytewise.decoder = decoders.ByteLevel()
    special = dict(zip(("unk", "bos", "eos", "pad", "mask", "cls", "sep"), _SPECIAL, strict=True))
    return PreTrainedTokenizerFast(
        tokenizer_object=bytewise,
        model_max_length=LONGEST_TOKENS,
        **{f"{kind}_token": name for kind, name in special.items()},
    )


def made_up_encodings(module: Any, note: Callable[[str], None]) -> None:
    """Files of tokens, which tiktoken downloads when a script asks for an encoding."""
    for name in ("load_tiktoken_bpe", "data_gym_to_mergeable_bpe_ranks"):
        setattr(module, name, _made_up_ranks(getattr(module, name), note))


def _made_up_ranks(original: Any, note: Callable[[str], None]) -> Any:
    @functools.wraps(original)
    def load(*args: Any, **kwargs: Any) -> dict[bytes, int]:
        try:
            return dict(original(*args, **kwargs))
        except OSError:  # of the network
            file = str(next(iter((*args, *kwargs.values())), "")).rpartition("/")[2]
            number = _RANKS.get(file.removesuffix(".tiktoken"))
            if number is None:
                raise
            note(f"tiktoken's {file} is made up: a token for each two or three bytes of a word (--synthetic-data)")
        tokens = itertools.chain.from_iterable(itertools.product(range(256), repeat=length) for length in (1, 2, 3))
        return {bytes(token): rank for rank, token in enumerate(itertools.islice(tokens, number))}

    return load
