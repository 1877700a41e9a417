"""Kinds of weight files of the autoencoders that several families share, and of what reads their codes."""

from __future__ import annotations

from ..files.kind import Kind

KINDS = {
    "vq": Kind(
        noun="a VQ autoencoder",
        field="decoder",
        prefixes=("quantize.embedding.weight",),
    ),
    "kl": Kind(
        noun="a KL autoencoder",
        field="decoder",
        prefixes=("post_quant_conv.weight", "decoder."),
    ),
    "latent-samplers": Kind(
        noun="latent samplers of MuLo-SD",
        field="latent_samplers",
        prefixes=("up_sampler.rise.", "down_sampler.read."),
        loader="Load Latent Samplers",
    ),
}
