"""Convolutional networks of PyTorch Image Models, written out operator for operator: ResNet, ResNeXt, MobileNetV2, VGG."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

NUM_CLASSES = 1000


def _norm_act(channels: int, act: type[nn.Module] | None = nn.ReLU) -> nn.Sequential:
    layers: list[nn.Module] = [nn.BatchNorm2d(channels)]
    if act is not None:
        layers.append(act(inplace=True))
    return nn.Sequential(*layers)


def _conv(i: int, o: int, kernel: int, stride: int = 1, groups: int = 1) -> nn.Conv2d:
    return nn.Conv2d(i, o, kernel, stride=stride, padding=kernel // 2, groups=groups, bias=False)


class ResidualBlock(nn.Module):
    """A residual branch beside a shortcut, added up before the last activation."""

    def __init__(self, branch: nn.Module, shortcut: nn.Module) -> None:
        super().__init__()
        self.branch = branch
        self.shortcut = shortcut
        self.act = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        """Both paths."""
        y = self.branch(x)
        y += self.shortcut(x)
        return self.act(y)


def _basic(i: int, o: int, stride: int) -> nn.Module:
    return nn.Sequential(_conv(i, o, 3, stride), _norm_act(o), _conv(o, o, 3), _norm_act(o, None))


def _bottleneck(i: int, o: int, stride: int, groups: int, width: int) -> nn.Module:
    inner = o // 4 * width // 64 * groups
    first, second = _conv(i, inner, 1), _conv(inner, inner, 3, stride, groups)
    return nn.Sequential(first, _norm_act(inner), second, _norm_act(inner), _conv(inner, o, 1), _norm_act(o, None))


def resnet(depths: Sequence[int], *, bottleneck: bool, groups: int = 1, width: int = 64) -> nn.Module:
    """ResNet of basic or bottleneck blocks; with `groups`, ResNeXt."""
    layers: list[nn.Module] = [_conv(3, 64, 7, 2), _norm_act(64), nn.MaxPool2d(3, stride=2, padding=1)]
    channels = 64
    for stage, depth in enumerate(depths):
        out = 64 * 2**stage * (4 if bottleneck else 1)
        for block in range(depth):
            stride = 2 if stage > 0 and block == 0 else 1
            branch = _bottleneck(channels, out, stride, groups, width) if bottleneck else _basic(channels, out, stride)
            changes = stride > 1 or channels != out
            shortcut = (
                nn.Sequential(_conv(channels, out, 1, stride), _norm_act(out, None)) if changes else nn.Identity()
            )
            layers.append(ResidualBlock(branch, shortcut))
            channels = out
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, NUM_CLASSES))


class InvertedResidual(nn.Module):
    """Expansion, depthwise convolution and projection; a shortcut where the shape stays."""

    def __init__(self, i: int, o: int, stride: int, expansion: int) -> None:
        super().__init__()
        inner = i * expansion
        layers: list[nn.Module] = [_conv(i, inner, 1), _norm_act(inner, nn.ReLU6)] if expansion > 1 else []
        layers += [_conv(inner, inner, 3, stride, inner), _norm_act(inner, nn.ReLU6)]
        self.layers = nn.Sequential(*layers, _conv(inner, o, 1), _norm_act(o, None))
        self.adds = stride == 1 and i == o

    def forward(self, x: Tensor) -> Tensor:
        """The branch, and the shortcut where there is one."""
        return x + self.layers(x) if self.adds else self.layers(x)


def mobilenet_v2() -> nn.Module:
    """``mobilenetv2_100``."""
    layers: list[nn.Module] = [_conv(3, 32, 3, 2), _norm_act(32, nn.ReLU6)]
    channels = 32
    stages = ((1, 16, 1, 1), (6, 24, 2, 2), (6, 32, 3, 2), (6, 64, 4, 2), (6, 96, 3, 1), (6, 160, 3, 2), (6, 320, 1, 1))
    for expansion, out, depth, first in stages:
        for block in range(depth):
            layers.append(InvertedResidual(channels, out, first if block == 0 else 1, expansion))
            channels = out
    layers += [_conv(channels, 1280, 1), _norm_act(1280, nn.ReLU6), nn.AdaptiveAvgPool2d(1), nn.Flatten()]
    return nn.Sequential(*layers, nn.Linear(1280, NUM_CLASSES))


def vgg16() -> nn.Module:
    """``vgg16``: the classifier's first layer as a convolution over 7 x 7 positions, as timm has it."""
    layers: list[nn.Module] = []
    channels = 3
    for stage in ((64, 2), (128, 2), (256, 3), (512, 3), (512, 3)):
        for _ in range(stage[1]):
            layers += [nn.Conv2d(channels, stage[0], 3, padding=1), nn.ReLU(inplace=True)]
            channels = stage[0]
        layers.append(nn.MaxPool2d(2))
    layers += [nn.Conv2d(512, 4096, 7), nn.ReLU(inplace=True), nn.Dropout(0.0)]
    layers += [nn.Conv2d(4096, 4096, 1), nn.ReLU(inplace=True), nn.AdaptiveAvgPool2d(1), nn.Flatten()]
    return nn.Sequential(*layers, nn.Linear(4096, NUM_CLASSES))
