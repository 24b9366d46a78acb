"""The study's two timm models, written out: the operators of timm 1.0 in their order, without timm or torchvision.

`VisionTransformer` is ViT with a class token, a learned position embedding and a norm before the blocks (the layout of
CLIP's image tower); `vit_huge_patch14_clip_224()` is its huge form. `ConvNeXt` is ConvNeXt V2 (arXiv 2301.00808), whose
blocks work on channels-last tensors between two permutes; `convnextv2_huge()` is its huge form. Both are classifiers
with 1,000 classes and without dropout or stochastic depth, as timm builds them by default. The class names `Block` and
`GlobalResponseNormMlp` are timm's, because activation checkpointing is applied by class name.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Attention(nn.Module):
    """Self-attention over (batch, tokens, channels) with one projection for query, key and value."""

    def __init__(self, dim: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.qkv = nn.Linear(dim, dim * 3)
        self.proj = nn.Linear(dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        """Attend."""
        batch, tokens, dim = x.shape
        qkv = self.qkv(x).reshape(batch, tokens, 3, self.num_heads, dim // self.num_heads).permute(2, 0, 3, 1, 4)
        q, k, v = qkv.unbind(0)
        x = F.scaled_dot_product_attention(q, k, v)
        x = x.transpose(1, 2).reshape(batch, tokens, dim)
        return self.proj(x)


class Mlp(nn.Module):
    """Two linear layers around a GELU."""

    def __init__(self, dim: int, hidden_dim: int) -> None:
        super().__init__()
        self.fc1 = nn.Linear(dim, hidden_dim)
        self.act = nn.GELU()
        self.fc2 = nn.Linear(hidden_dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        """Expand, activate, contract."""
        x = self.fc1(x)
        x = self.act(x)
        x = self.fc2(x)
        return x  # noqa: RET504 (rebinding frees the hidden activation's name before the return, as in timm)


class Block(nn.Module):
    """A pre-norm transformer block."""

    def __init__(self, dim: int, num_heads: int) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(dim)
        self.attn = Attention(dim, num_heads)
        self.norm2 = nn.LayerNorm(dim)
        self.mlp = Mlp(dim, 4 * dim)

    def forward(self, x: Tensor) -> Tensor:
        """Attention and MLP, each with its residual."""
        x = x + self.attn(self.norm1(x))
        x = x + self.mlp(self.norm2(x))
        return x  # noqa: RET504


class PatchEmbed(nn.Module):
    """An image as a sequence of linearly embedded patches."""

    def __init__(self, patch_size: int, dim: int) -> None:
        super().__init__()
        self.proj = nn.Conv2d(3, dim, kernel_size=patch_size, stride=patch_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, 3, height, width) to (batch, patches, channels)."""
        x = self.proj(x)
        return x.flatten(2).transpose(1, 2)


class VisionTransformer(nn.Module):
    """ViT with the layout of CLIP's image tower and a linear classifier on the class token."""

    def __init__(
        self, *, image_size: int, patch_size: int, dim: int, depth: int, num_heads: int, num_classes: int
    ) -> None:
        super().__init__()
        self.patch_embed = PatchEmbed(patch_size, dim)
        self.cls_token = nn.Parameter(torch.zeros(1, 1, dim))
        self.pos_embed = nn.Parameter(torch.randn(1, (image_size // patch_size) ** 2 + 1, dim) * 0.02)
        self.norm_pre = nn.LayerNorm(dim)
        self.blocks = nn.Sequential(*(Block(dim, num_heads) for _ in range(depth)))
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        """Class logits of a batch of images."""
        x = self.patch_embed(x)
        x = torch.cat([self.cls_token.expand(x.shape[0], -1, -1), x], dim=1)
        x = x + self.pos_embed
        x = self.norm_pre(x)
        x = self.blocks(x)
        x = self.norm(x)
        x = x[:, 0]
        return self.head(x)


class LayerNorm2d(nn.LayerNorm):
    """Layer norm over the channels of (batch, channels, height, width)."""

    def __init__(self, dim: int) -> None:
        super().__init__(dim, eps=1e-6)

    def forward(self, x: Tensor) -> Tensor:
        """Normalise; the result has channels-last strides."""
        x = x.permute(0, 2, 3, 1)
        x = F.layer_norm(x, self.normalized_shape, self.weight, self.bias, self.eps)
        return x.permute(0, 3, 1, 2)


class GlobalResponseNorm(nn.Module):
    """Global response normalization of (batch, height, width, channels)."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(dim))
        self.bias = nn.Parameter(torch.zeros(dim))

    def forward(self, x: Tensor) -> Tensor:
        """Scale every channel by its share of the spatial norm."""
        x_g = x.norm(p=2, dim=(1, 2), keepdim=True)
        x_n = x_g / (x_g.mean(dim=-1, keepdim=True) + 1e-6)
        return x + torch.addcmul(self.bias.view(1, 1, 1, -1), self.weight.view(1, 1, 1, -1), x * x_n)


class GlobalResponseNormMlp(nn.Module):
    """Two linear layers around a GELU and a global response norm."""

    def __init__(self, dim: int, hidden_dim: int) -> None:
        super().__init__()
        self.fc1 = nn.Linear(dim, hidden_dim)
        self.act = nn.GELU()
        self.grn = GlobalResponseNorm(hidden_dim)
        self.fc2 = nn.Linear(hidden_dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        """Expand, activate, normalise, contract."""
        x = self.fc1(x)
        x = self.act(x)
        x = self.grn(x)
        x = self.fc2(x)
        return x  # noqa: RET504


class ConvNeXtBlock(nn.Module):
    """Depthwise convolution, then norm and MLP on channels-last, with a residual."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.conv_dw = nn.Conv2d(dim, dim, kernel_size=7, padding=3, groups=dim)
        self.norm = nn.LayerNorm(dim, eps=1e-6)
        self.mlp = GlobalResponseNormMlp(dim, 4 * dim)

    def forward(self, x: Tensor) -> Tensor:
        """Mix space, then channels."""
        shortcut = x
        x = self.conv_dw(x)
        x = x.permute(0, 2, 3, 1)
        x = self.norm(x)
        x = self.mlp(x)
        x = x.permute(0, 3, 1, 2)
        x = x + shortcut
        return x  # noqa: RET504


class ConvNeXtStage(nn.Module):
    """A downsampling by two (but in the first stage) and a row of blocks."""

    def __init__(self, in_dim: int, dim: int, depth: int, block: Callable[[int], nn.Module] = ConvNeXtBlock) -> None:
        super().__init__()
        if in_dim == dim:
            self.downsample: nn.Module = nn.Identity()
        else:
            self.downsample = nn.Sequential(LayerNorm2d(in_dim), nn.Conv2d(in_dim, dim, kernel_size=2, stride=2))
        self.blocks = nn.Sequential(*(block(dim) for _ in range(depth)))

    def forward(self, x: Tensor) -> Tensor:
        """Downsample and run the blocks."""
        x = self.downsample(x)
        x = self.blocks(x)
        return x  # noqa: RET504


class ConvNeXtHead(nn.Module):
    """Average over space, normalise, classify."""

    def __init__(self, dim: int, num_classes: int) -> None:
        super().__init__()
        self.global_pool = nn.AdaptiveAvgPool2d(1)
        self.norm = LayerNorm2d(dim)
        self.fc = nn.Linear(dim, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        """Class logits."""
        x = self.global_pool(x)
        x = self.norm(x)
        x = x.flatten(1)
        return self.fc(x)


class ConvNeXt(nn.Module):
    """ConvNeXt V2 with a 4x4 patch stem, or another version's `block`, made of its number of channels."""

    def __init__(
        self,
        *,
        depths: Sequence[int],
        dims: Sequence[int],
        num_classes: int,
        block: Callable[[int], nn.Module] = ConvNeXtBlock,
    ) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, dims[0], kernel_size=4, stride=4), LayerNorm2d(dims[0]))
        stages = zip([dims[0], *dims[:-1]], dims, depths, strict=True)
        self.stages = nn.Sequential(*(ConvNeXtStage(*stage, block) for stage in stages))
        self.head = ConvNeXtHead(dims[-1], num_classes)

    def forward(self, x: Tensor) -> Tensor:
        """Class logits of a batch of images."""
        x = self.stem(x)
        x = self.stages(x)
        return self.head(x)


def vit_huge_patch14_clip_224() -> VisionTransformer:
    """ViT-H/14, timm's ``vit_huge_patch14_clip_224``: 632 million parameters."""
    return VisionTransformer(image_size=224, patch_size=14, dim=1280, depth=32, num_heads=16, num_classes=1000)


def convnextv2_huge() -> ConvNeXt:
    """ConvNeXt V2 huge, timm's ``convnextv2_huge``: 660 million parameters."""
    return ConvNeXt(depths=(3, 3, 27, 3), dims=(352, 704, 1408, 2816), num_classes=1000)
