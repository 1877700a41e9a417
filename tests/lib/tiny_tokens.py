"""A tiny random VQ tokenizer, for samplers that decode."""

import dataclasses

import torch
from fastar_nodes.networks.autoencoder import VQAutoencoder, VQConfig, VQModel
from fastar_nodes.networks.latent_samplers import LatentSamplers, LatentSamplersConfig, LatentSamplersModel
from fastar_nodes.samplers.tokens.mulosd.drafting import PixelUpSampling

CODES = 23


def tiny_vq(codes: int = CODES) -> VQModel:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        net = VQAutoencoder(
            VQConfig(ch=8, ch_mult=(1, 2), blocks=1, z_channels=8, codes=codes, code_channels=4, groups=4)
        )
    return VQModel(net.eval().requires_grad_(False), "tiny vq")


VQ = tiny_vq()
UP = PixelUpSampling(VQ)


def tiny_latent_samplers(ratio: int = 2, codes: int = CODES) -> LatentSamplersModel:
    """Random latent samplers for the tokenizer of ``codes`` codes."""
    with torch.random.fork_rng():
        torch.manual_seed(1)
        net = LatentSamplers(
            LatentSamplersConfig(ratio, codes, 4, up_width=12, up_small=2, up_large=1, down_width=8, down_small=1)
        )
        for weight in net.parameters():
            torch.nn.init.normal_(weight, std=0.5)
    net.codebook.load_state_dict(tiny_vq(codes).net.quantize.state_dict())
    return LatentSamplersModel(net.eval().requires_grad_(False), "tiny latent samplers")


def other_vocabulary(model, codes):
    net = model.net
    return dataclasses.replace(model, net=type(net)(dataclasses.replace(net.config, vocab=codes)).eval(), name="other")
