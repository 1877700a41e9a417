"""Random weights as the authors initialise them, for trainings and for models of official sizes."""

from __future__ import annotations

from typing import TypeVar

from torch import nn

from ...networks.bitdance import BlockNetwork
from ...networks.hybrid import Hybrid
from ...networks.llama import PROMPT, Llama
from ...networks.mar import MAR
from ...networks.nextstep import NextStep

AnyBitDance = TypeVar("AnyBitDance", bound=BlockNetwork)


def _xavier(layers: nn.Module) -> None:
    """Xavier matrices and zero biases."""
    for layer in layers.modules():
        if isinstance(layer, nn.Linear):
            nn.init.xavier_uniform_(layer.weight)
            nn.init.zeros_(layer.bias)


def initialise_mar(net: MAR) -> MAR:
    """Xavier matrices, std 0.02 embeddings, adaLN and the last layer zero."""
    _xavier(net)

    for name, p in net.named_parameters():
        is_embedding = "embed_learned" in name or name in ("class_emb.weight", "fake_latent", "mask_token")
        is_time_matrix = "time_embed.mlp" in name and p.ndim == 2

        if is_embedding or is_time_matrix:
            nn.init.normal_(p, std=0.02)
        elif "adaLN_modulation" in name or "final_layer.linear" in name:
            nn.init.zeros_(p)

    return net


def initialise_llama(net: Llama) -> Llama:
    """Std 0.02 everywhere, unit norms, zero biases; LlamaGen's output layer is zero."""
    zero_output = net.config.condition != PROMPT

    for name, p in net.named_parameters():
        if name.endswith(".bias") or name == "output.weight" and zero_output:
            nn.init.zeros_(p)
        elif p.ndim > 1:
            nn.init.normal_(p, std=0.02)

    return net


def initialise_bitdance(net: AnyBitDance) -> AnyBitDance:
    """Std 0.02 in the transformer; Xavier matrices in the diffusion head, whose adaLN and last layer are zero."""
    for name, p in net.named_parameters():
        if name.endswith(".bias"):
            nn.init.zeros_(p)
        elif p.ndim > 1:
            nn.init.normal_(p, std=0.02)

    _xavier(net.denoiser)
    for layer in (*net.denoiser.ada_ln_blocks, net.denoiser.final_layer.ada_ln_modulation):
        nn.init.zeros_(layer.weight)
    nn.init.zeros_(net.denoiser.final_layer.linear.weight)
    return net


def initialise_nextstep(net: NextStep) -> NextStep:
    """Std 0.02 in language model and projections; Xavier matrices in the head, whose adaLN and last layer are zero."""
    initialise_llama(net)
    _xavier(net.head)
    for name, p in net.head.named_parameters():
        if "adaLN_modulation" in name or "final_layer.linear" in name:
            nn.init.zeros_(p)

    return net


def initialise_hybrid(net: Hybrid) -> Hybrid:
    """The parts as above; Xavier matrices in the MLPs between them."""
    initialise_mar(net.mar)
    initialise_llama(net.llm)

    _xavier(net.proj_in)
    _xavier(net.proj_out)

    return net
