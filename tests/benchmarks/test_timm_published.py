"""The published vision figures: which rows are read, and steps that run."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from autosac.errors import UsageError
from benchmarks import timm_published
from benchmarks.timm_published import Published, make_step, published

TRAIN = "model,train_samples_per_sec,train_step_time,train_batch_size,train_img_size,param_count\n"
INFER = "model,infer_img_size,infer_samples_per_sec,infer_step_time,infer_batch_size,param_count\n"


def test_rows_that_are_read(tmp_path: Path) -> None:
    """Known models at 224 pixels, of three files in two layouts; with channels last only convolutional networks."""
    for name, (_, trains, _) in timm_published.FILES.items():
        rows = "convnext_base,336.98,378.1,128,224,88.59\nunknown,1,2,3,224,5\nvit_base_patch16_224,1,2,3,384,5\n"
        if not trains:
            rows = "convnext_base,224,1301.1,787.0,1024,88.59\nconvnext_base,288,788.1,1299.3,1024,88.59\n"
        (tmp_path / name.format("nchw")).write_text((TRAIN if trains else INFER) + rows)
        rows = "resnet50,10,419.5,512,224,25.5\nconvnext_base,1,2,3,224,5\n" if trains else ""
        (tmp_path / name.format("nhwc")).write_text((TRAIN if trains else INFER) + rows)
    assert list(published(tmp_path)) == [
        Published("rtx-3090", "convnext_base", True, False, 128, 378.1),
        Published("rtx-3090", "resnet50", True, False, 512, 419.5, channels_last=True),
        Published("rtx-3090", "convnext_base", False, True, 1024, 787.0),
        Published("rtx-4090", "convnext_base", False, True, 1024, 787.0),
    ]


def test_a_folder_without_the_files(tmp_path: Path) -> None:
    """The message names the file and what the folder has to be."""
    with pytest.raises(UsageError, match=r"pt112-cu113-rtx3090\.csv is not there: --truth is the folder `results`"):
        list(published(tmp_path))


@pytest.mark.parametrize("trains", [True, False])
def test_a_step_of_the_first_convnext(monkeypatch: pytest.MonkeyPatch, trains: bool) -> None:
    """A small ConvNeXt V1 trains, or only runs forward, on real tensors: its parameters change, or have no gradients."""
    monkeypatch.setitem(timm_published.MODELS, "convnext_base", lambda: timm_published.convnext(8, 8, 16, 16))
    model, step = make_step(Published("rtx-3090", "convnext_base", trains, True, 2, 1.0), torch.device("cpu"))
    before = [parameter.detach().clone() for parameter in model.parameters()]
    assert torch.isfinite(step())
    changed = [not torch.equal(old, new) for old, new in zip(before, model.parameters(), strict=True)]
    assert any(changed) == trains


@pytest.mark.parametrize("channels_last", [True, False])
@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("resnet18", 11.69),
        ("resnet50", 25.56),
        ("resnext50_32x4d", 25.03),
        ("mobilenetv2_100", 3.50),
        ("vgg16", 138.36),
    ],
)
def test_convolutional_networks_are_those_that_were_measured(name: str, parameters: float, channels_last: bool) -> None:
    """As many millions of parameters as published, and a class for each image."""
    layout = torch.channels_last if channels_last else torch.contiguous_format
    with torch.device("meta"):
        model = timm_published.MODELS[name]().to(memory_format=layout)
        assert model(torch.empty(2, 3, 224, 224).contiguous(memory_format=layout)).shape == (2, 1000)
    assert round(sum(p.numel() for p in model.parameters()) / 1e6, 2) == parameters
