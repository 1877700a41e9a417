"""A tiny random VQ tokenizer, for samplers that decode."""

import dataclasses

import torch
from fastar_nodes.networks.autoencoder import VQAutoencoder, VQConfig, VQModel
from fastar_nodes.samplers.tokens.mulosd.upsampling import UpSampling

CODES = 23


def tiny_vq(codes: int = CODES) -> VQModel:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        net = VQAutoencoder(
            VQConfig(ch=8, ch_mult=(1, 2), blocks=1, z_channels=8, codes=codes, code_channels=4, groups=4)
        )
    return VQModel(net.eval().requires_grad_(False), "tiny vq")


VQ = tiny_vq()
UP = UpSampling(VQ)


def other_vocabulary(model, codes):
    net = model.net
    return dataclasses.replace(model, net=type(net)(dataclasses.replace(net.config, vocab=codes)).eval(), name="other")
