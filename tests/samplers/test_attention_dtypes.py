"""Attention in 16 bits takes a mask of numbers in the dtype of its queries.

PyTorch's kernels for a GPU refuse others, those for a CPU do not.
"""

import copy
import dataclasses

import pytest
import test_block_contract as blocks
import test_sampler_contract as masked
import test_token_contract as tokens
import torch
import torch.nn.functional as F
from fastar_nodes.networks.mar import MARModel
from fastar_nodes.samplers.engine import finish

CASES = [(contract, name) for contract in (masked, tokens, blocks) for name in contract.CASES]


def in_fp16(model):
    """The model with weights in fp16; as the loaders do, the last layer of a MAR's head stays in fp32."""
    net = copy.deepcopy(model.net).half()
    if isinstance(model, MARModel):
        net.head.final_layer.linear.float()
    return dataclasses.replace(model, net=net)


@pytest.fixture
def masks(monkeypatch):
    """How many masks of numbers attention has got so far."""
    attention, seen = F.scaled_dot_product_attention, []

    def strict(q, k, v, mask=None, *more, **named):
        if mask is not None and mask.dtype is not torch.bool:
            assert mask.dtype is q.dtype
            seen.append(mask.dtype)
        return attention(q, k, v, mask, *more, **named)

    monkeypatch.setattr(F, "scaled_dot_product_attention", strict)
    return seen


@pytest.mark.parametrize(("contract", "name"), CASES)
@pytest.mark.fast_cases(every=4)
def test_masks_have_the_dtype_of_the_queries(contract, name, masks):
    out = finish(contract.start(name, move=in_fp16))

    result = out[0]
    assert result.isfinite().all()


def test_samplers_of_tokens_mask(masks):
    finish(tokens.start("zipar", move=in_fp16))

    assert torch.float16 in masks
