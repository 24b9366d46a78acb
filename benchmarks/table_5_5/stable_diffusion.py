"""Stable Diffusion 1.5, trained for a step: the diffusion model of AUTO-SAC Table 5.5.

The three networks are those of diffusers and transformers, built from the configurations of the published checkpoint, which
are written out here: the CLIP ViT-L/14 text encoder (123 million parameters), the VAE's encoder (34 million) and the UNet
(860 million). Nothing is downloaded.

One step is that of diffusers' own text-to-image training: text encoder and VAE are frozen and run without gradients; noise
of a random timestep of the schedule (`denoising_steps` of them) is added to the latents; the UNet predicts it. Parameters,
gradients and AdamW's states have one `dtype`, as those of the language model (see llama.py).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from diffusers.models.autoencoders.vae import Encoder
from diffusers.models.unets.unet_2d_condition import UNet2DConditionModel
from torch import Tensor, nn
from transformers import CLIPTextConfig, CLIPTextModel

LATENT_SCALE = 0.18215
VOCABULARY = 49_408
TEXT = {
    "vocab_size": VOCABULARY,
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "max_position_embeddings": 77,
    "projection_dim": 768,
    "hidden_act": "quick_gelu",
}
VAE_ENCODER = {
    "in_channels": 3,
    "out_channels": 4,
    "down_block_types": ("DownEncoderBlock2D",) * 4,
    "block_out_channels": (128, 256, 512, 512),
    "layers_per_block": 2,
    "norm_num_groups": 32,
    "double_z": True,
}
UNET = {
    "sample_size": 64,
    "in_channels": 4,
    "out_channels": 4,
    "center_input_sample": False,
    "flip_sin_to_cos": True,
    "freq_shift": 0,
    "down_block_types": ("CrossAttnDownBlock2D",) * 3 + ("DownBlock2D",),
    "up_block_types": ("UpBlock2D",) + ("CrossAttnUpBlock2D",) * 3,
    "block_out_channels": (320, 640, 1280, 1280),
    "layers_per_block": 2,
    "downsample_padding": 1,
    "mid_block_scale_factor": 1,
    "act_fn": "silu",
    "norm_num_groups": 32,
    "norm_eps": 1e-5,
    "cross_attention_dim": 768,
    "attention_head_dim": 8,
}


class StableDiffusion(nn.Module):
    """Images and captions to the loss of the predicted noise."""

    def __init__(self, denoising_steps: int) -> None:
        super().__init__()
        self.text_encoder = CLIPTextModel(CLIPTextConfig(**TEXT)).requires_grad_(False).eval()
        self.vae_encoder = Encoder(**VAE_ENCODER).requires_grad_(False).eval()
        self.vae_quant = nn.Conv2d(8, 8, 1).requires_grad_(False)
        self.unet = UNet2DConditionModel(**UNET)
        betas = torch.linspace(0.00085**0.5, 0.012**0.5, denoising_steps, dtype=torch.float32) ** 2
        kept = (1 - betas).cumprod(0)
        self.register_buffer("signal", kept.sqrt(), persistent=False)
        self.register_buffer("noise", (1 - kept).sqrt(), persistent=False)

    def encode(self, images: Tensor) -> Tensor:
        """Images to latents, drawn from the VAE's distribution."""
        mean, log_variance = self.vae_quant(self.vae_encoder(images)).chunk(2, dim=1)
        latents = mean + torch.exp(0.5 * log_variance.clamp(-30, 20)) * torch.randn_like(mean)
        return latents * LATENT_SCALE

    def forward(self, images: Tensor, captions: Tensor) -> Tensor:
        """The mean squared error of the predicted noise."""
        with torch.no_grad():
            latents = self.encode(images)
            text = self.text_encoder(captions)[0]
        noise = torch.randn_like(latents)
        steps = torch.randint(0, self.signal.shape[0], (latents.shape[0],), device=latents.device)
        signal, share = (table[steps].to(latents.dtype)[:, None, None, None] for table in (self.signal, self.noise))
        predicted = self.unet(signal * latents + share * noise, steps, encoder_hidden_states=text).sample
        return F.mse_loss(predicted.float(), noise.float())


def make_step(
    device: torch.device,
    *,
    batch_size: int,
    image_size: int,
    text_len: int = 77,
    denoising_steps: int = 50,
    dtype: str = "bfloat16",
) -> tuple[nn.Module, Any]:
    """The three networks and one training step: encode, forward, backward, fused AdamW of the UNet."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(getattr(torch, dtype))
    try:
        with device:
            model = StableDiffusion(denoising_steps)
    finally:
        torch.set_default_dtype(before)
    optimizer = torch.optim.AdamW(model.unet.parameters(), lr=1e-5, fused=True)
    images = torch.randn(batch_size, 3, image_size, image_size, device=device, dtype=getattr(torch, dtype))
    captions = torch.randint(0, VOCABULARY, (batch_size, text_len), device=device)

    def step() -> None:
        model(images, captions).backward()
        optimizer.step()
        optimizer.zero_grad()

    return model, step
