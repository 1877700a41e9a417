"""Networks in 16 bits against fp32: every dtype that "auto" may take, residual streams in fp32, passes of one shape."""

import copy
import math
import sys
from pathlib import Path

import pytest
import seeds
import torch
from fastar_nodes.model_loaders.bitdance.loader import load_bitdance
from fastar_nodes.model_loaders.hybrid.loader import load_hybrid
from fastar_nodes.model_loaders.kinds import DTYPES, KINDS
from fastar_nodes.model_loaders.llamagen.loader import load_llamagen
from fastar_nodes.model_loaders.llamagen.text import load_text_encoder
from fastar_nodes.model_loaders.mar.loader import load_mar
from fastar_nodes.model_loaders.nextstep.loader import load_nextstep
from fastar_nodes.model_loaders.tar.loader import load_detokenizer, load_ta_tok, load_tar
from fastar_nodes.networks import mar as mar_module
from fastar_nodes.networks.nextstep import Rows
from fastar_nodes.networks.precision import is_finite
from janus_files import tiny_janus
from qwen_reference import tiny_tar
from tiny_models import tiny_mar
from tokens_reference import tiny_gpt

DEMO = Path(sys.modules["fastar_nodes"].__file__).parent / "demo" / "checkpoints"
PARITY = Path(__file__).resolve().parents[1] / "parity" / "bitdance"
NEXTSTEP = Path(__file__).resolve().parents[1] / "parity" / "nextstep" / "model"
# Rounding of a number: 2^-8 in bf16, 2^-11 in fp16. A network adds a few of them.
MOST = {"bf16": 0.04, "fp16": 0.005}


def token_logits(net, prefix):
    return net.logits(net.prefill(prefix, 4, 4)[0])


def llamagen(name, dtype):
    net = load_llamagen(DEMO / f"{name}.safetensors", dtype).net
    return token_logits(net, net.prefix(torch.tensor([1, 3]), guided=True))


def dtok(dtype):
    net = load_detokenizer(DEMO / "dtok-low.safetensors", dtype).net
    rows = torch.randn(1, 8, net.config.condition_size, generator=torch.Generator().manual_seed(0))
    return token_logits(net, net.prefix(rows))


def tar(dtype):
    net = load_tar(DEMO / "tar.safetensors", dtype).net
    return token_logits(net, net.prefix(torch.arange(9)[None]))


def janus(dtype):
    net = tiny_janus(dtype).net
    return token_logits(net, net.prefix(torch.arange(9)[None]))


def bitdance(dtype):
    """Predictors of two blocks of the recorded model of four tokens a block."""
    net = load_bitdance(PARITY / "imagenet" / "BitDance_tiny_4x.safetensors", dtype, heads=4).net
    prefix, first = net.class_rows(torch.tensor([1]))
    rows = torch.cat([first, first.flip(1)], 1)
    return net.predictors(prefix, rows, (net.side, 2 * net.side)).float()


def nextstep(dtype):
    """Conditions of the first token of the recorded model, and its head's output for them."""
    model = load_nextstep(NEXTSTEP, dtype)
    net = model.net
    row = model.row(model.prompt("a red house"), (3, 3))
    z, _ = net.begin(*model.prefix(Rows([row], [None]), 9), 9)
    noise = torch.randn(1, net.channels, generator=torch.Generator().manual_seed(0))
    head = net.head(noise, torch.full((1,), 0.5), z[:, 0])
    return torch.cat([z.flatten().float(), head.flatten().float()])


def ta_tok(dtype):
    net = load_ta_tok(DEMO / "ta-tok.safetensors", dtype).net
    return net.features(torch.arange(16)[None])


def hybrid(dtype):
    model = load_hybrid(DEMO / "hybrid.safetensors", dtype)
    return conditions(model.net, lambda: model.conditioning(["a cat"], "Generate an image.", False))


def mar(dtype):
    net = load_mar(DEMO / "mar.safetensors", dtype).net
    return conditions(net, lambda: mar_module.ClassConditioning(net, torch.tensor([2])))


@torch.no_grad()
def conditions(net, make):
    """Conditions z of the head behind 10 known tokens, and the head's output for them."""
    g = torch.Generator().manual_seed(0)
    c = net.config
    tokens = torch.randn(1, c.tokens, c.channels, generator=g)
    known = torch.randperm(c.tokens, generator=g)[None, :10]
    rows = make()
    encoded = rows.fuse(net.encode(tokens, known, rows.vectors(False)), known, False)
    z = net.decode(encoded, known)
    timesteps = torch.full((c.tokens,), 500)
    return torch.cat([z.flatten(1).float(), net.head(tokens[0], timesteps, z[0]).flatten()[None]], 1)


def t5(dtype, folder):
    pytest.importorskip("transformers", reason="transformers is not installed: the text encoder cannot be tested here")
    return load_text_encoder(folder, dtype).encode(["a cat"])[0]


FAMILIES = {
    "bitdance": bitdance,
    "janus": janus,
    "hybrid": hybrid,
    "mar": mar,
    "nextstep": nextstep,
    "llamagen": lambda dtype: llamagen("llamagen-low", dtype),
    "dtok": dtok,
    "ta-tok": ta_tok,
    "t5": t5,
    "tar": tar,
}
CHECKED = [(family, half) for family, kind in KINDS.items() for half in kind.checked]


@pytest.mark.parametrize(("family", "half"), CHECKED)
@pytest.mark.fast_cases("mar-fp16", "llamagen-bf16", "tar-bf16")
def test_a_checked_dtype_is_near_fp32(family, half, tmp_path):
    more = (seeds.write_t5(tmp_path / "t5-tiny"),) if family == "t5" else ()
    with torch.no_grad():
        expected = FAMILIES[family]("fp32", *more)
        found = FAMILIES[family](half, *more).float()
    error = (found - expected).norm() / expected.norm()
    assert 0 < error < MOST[half], error


def test_par_too():
    """A PAR is of the family LlamaGen."""
    expected = llamagen("par", "fp32")
    for half, most in MOST.items():
        assert 0 < (llamagen("par", half) - expected).norm() / expected.norm() < most


# ------------------------------------------------------------------------------------------ the residual stream


@torch.no_grad()
def test_the_sum_of_mars_blocks_may_exceed_fp16():
    """Two blocks add 40,000 each to one number of every row: 80,000 is beyond fp16."""
    net = copy.deepcopy(tiny_mar().net)
    for block in net.encoder_blocks[:2]:
        block.mlp.fc2.bias[0] = 40_000.0
    tokens = torch.randn(1, 16, net.config.channels)
    known = torch.arange(5)[None]
    expected = net.encode(tokens, known, net.class_rows(None, 1))
    found = net.half().encode(tokens, known, net.class_rows(None, 1))
    assert found.dtype == torch.float16 and found.isfinite().all()
    torch.testing.assert_close(found.float(), expected, rtol=0.02, atol=0.02)


@torch.no_grad()
@pytest.mark.parametrize("half", [torch.float16, torch.bfloat16])
def test_the_sum_of_a_token_models_blocks_may_exceed_fp16(half):
    """Embeddings of 40,000, and a first block that adds as much again: the stream is 80,000 where it counts."""
    net = copy.deepcopy(tiny_gpt().net)
    net.tok_embeddings.weight.fill_(0.0)
    net.tok_embeddings.weight[:, 0] = 40_000.0
    net.cls_embedding["embedding_table"].weight.copy_(net.tok_embeddings.weight[:1])
    block = net.layers[0]
    # RMSNorm of the row is sqrt(C) in its first number; w2(silu(w1 x) w3 x) is then 40,000 there.
    loudest = net.config.dim**0.5
    block.attention.wo.weight.zero_()
    block.ffn_norm.weight.fill_(1.0)
    for layer in (block.feed_forward.w1, block.feed_forward.w3, block.feed_forward.w2):
        layer.weight.zero_()
    block.feed_forward.w1.weight[0, 0] = 10 / loudest
    block.feed_forward.w3.weight[0, 0] = 10 / loudest
    block.feed_forward.w2.weight[0, 0] = 400.0

    prefix = net.prefix(torch.tensor([1]))
    expected = token_logits(net, prefix)
    hidden, _ = net.prefill(prefix, 4, 4)
    assert hidden[0, 0, 0] > 79_000

    net.to(half)
    found = token_logits(net, net.prefix(torch.tensor([1])))
    error = (found - expected).norm() / expected.norm()
    assert error < (0.005 if half is torch.float16 else 0.04)


# ------------------------------------------------------------------------------------------ passes of one shape

MODELS = {
    "class": lambda: tiny_gpt().net,
    "par": lambda: tiny_gpt(special=3).net,
    "tar": lambda: tiny_tar().net,
    "janus": lambda: tiny_janus().net,
}


@torch.no_grad()
@pytest.mark.parametrize("half", list(DTYPES))
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.fast_cases("class-fp32", "par-bf16", "tar-fp16", "janus-fp32")
def test_rows_of_one_shape_are_equal_alone_and_together(name, half):
    """Four tokens in one pass, and the same one by one: equal bits, in 16 bits too."""
    net = copy.deepcopy(MODELS[name]()).to(DTYPES[half])
    prompt = torch.tensor([[1, 2, 3]]) if net.config.condition == "prompt" else torch.tensor([1])
    prefix = net.prefix(prompt)
    n = prefix.shape[1]
    x = net.tok_embeddings(torch.tensor([[3, 1, 4, 1]]))

    _, cache = net.prefill(prefix, 4, 16)
    place = torch.arange(4)
    visible = torch.arange(n + 4) <= n + place[:, None]
    together = net.feed(x, place, n + place, cache, n + 4, visible, rows=8)

    _, cache = net.prefill(prefix, 4, 16)
    alone = [net.feed(x[:, i : i + 1], place[i : i + 1], n + place[i : i + 1], cache, n + i + 1, rows=8) for i in place]
    assert torch.equal(together, torch.cat(alone, 1))

    # The values are those of a pass of its own shape, up to rounding.
    _, cache = net.prefill(prefix, 4, 16)
    plain = net.feed(x, place, n + place, cache, n + 4, visible)
    torch.testing.assert_close(together.float(), plain.float(), rtol=0.05, atol=0.05 * float(plain.float().abs().max()))


FLOATS = (torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_one_number_that_is_not_finite_is_found_anywhere(dtype):
    values = torch.linspace(-3, 3, 1001).to(dtype)
    assert is_finite(values) and is_finite(values[:0])

    wrong = [math.nan] if dtype is torch.float8_e4m3fn else [math.nan, math.inf, -math.inf]
    for value in wrong:
        for place in (0, 500, 1000):
            spoiled = values.clone()
            spoiled[place] = torch.tensor(value).to(dtype)
            assert not is_finite(spoiled)
