"""LlamaGen's network: shapes from names, and the cache against the uncached pass."""

import pytest
import torch
import torch.nn.functional as F
from fastar_nodes.lab.training.initialise import initialise_llama
from fastar_nodes.networks.llama import Llama, LlamaConfig, attend

SHAPES = {
    "class": LlamaConfig(32, 3, 4, 4, 48, 19, "class", 5),
    "class, absolute": LlamaConfig(32, 2, 4, 4, 48, 19, "class", 5, absolute=16),
    "text": LlamaConfig(32, 2, 4, 4, 48, 19, "text", 6, text_rows=7),
    "features, grouped heads": LlamaConfig(32, 2, 4, 2, 48, 19, "features", 6, absolute=40),
    "par": LlamaConfig(32, 2, 4, 4, 48, 19, "class", 5, special=3),
}


def build(config: LlamaConfig, seed: int = 0) -> Llama:
    net = Llama(config).eval().requires_grad_(False)
    g = torch.Generator().manual_seed(seed)
    for p in net.state_dict().values():
        p.copy_(torch.randn(p.shape, generator=g) * (1.0 if p.ndim == 1 else 0.4))
    return net


def condition(config: LlamaConfig, rows: int = 4) -> torch.Tensor:
    if config.condition == "class":
        return torch.tensor([1, 4])
    return torch.randn(2, rows, config.condition_size, generator=torch.Generator().manual_seed(3))


@pytest.mark.parametrize("name", SHAPES)
def test_the_state_dict_says_its_own_shape(name):
    config = SHAPES[name]
    state = Llama(config).state_dict()
    assert LlamaConfig.of_llamagen(state, heads=4) == config
    Llama(LlamaConfig.of_llamagen(state, 4)).load_state_dict(build(config).state_dict(), strict=True)


def test_shapes_that_make_no_sense_are_refused():
    state = Llama(SHAPES["class"]).state_dict()
    for heads, sentence in (
        (None, "no official GPT has the width 32"),
        (5, "heads: 5 does not fit"),
        (16, "heads: 16 does not fit"),
    ):
        with pytest.raises(ValueError, match=sentence):
            LlamaConfig.of_llamagen(state, heads)
    with pytest.raises(ValueError, match="heads: 1 does not fit the attention weights"):
        LlamaConfig.of_llamagen(Llama(SHAPES["features, grouped heads"]).state_dict(), 1)
    with pytest.raises(KeyError, match="cls_embedding"):
        LlamaConfig.of_llamagen({k: v for k, v in state.items() if not k.startswith("cls_")}, 4)
    with pytest.raises(KeyError, match="tok_embeddings"):
        LlamaConfig.of_llamagen({})


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("pieces", [[1] * 9, [4, 5], [1, 3, 5]], ids=str)
@pytest.mark.parametrize("image", [0, 3])
@pytest.mark.fast_cases(*(f"3-[1, 3, 5]-{name}" for name in SHAPES), f"0-{[1] * 9}-class")
def test_cached_logits_are_the_uncached_ones(name, pieces, image):
    """The same tokens one by one, several at once with a causal mask, or the first ones together with the prefix."""
    config = SHAPES[name]
    net, tokens = build(config), torch.randint(config.vocab, (2, 9), generator=torch.Generator().manual_seed(1))
    prefix = net.prefix(condition(config), guided=True)
    halves, n = torch.cat([tokens, tokens]), prefix.shape[1]
    whole = net(torch.cat([prefix, net.tok_embeddings(halves)], 1), torch.arange(-n, 9), net.positions(3, n))[
        :, n - 1 :
    ]
    first, cache = net.prefill(prefix, 3, 9, image=net.tok_embeddings(halves[:, :image]) if image else None)
    out, at = [net.logits(first)[:, :1]], 0
    torch.testing.assert_close(net.logits(first), whole[:, : 1 + image], rtol=1e-4, atol=1e-4)
    for count in pieces:
        place = torch.arange(at, at + count)
        slot, end = place + n, n + at + count
        mask = None if count == 1 else torch.arange(end) <= slot[:, None]
        out.append(net.logits(net.feed(net.tok_embeddings(halves[:, place]), place, slot, cache, end, mask)))
        at += count
    torch.testing.assert_close(torch.cat(out, 1), whole, rtol=1e-4, atol=1e-4)
    assert cache.bytes == 4 * config.depth * 2 * 4 * config.kv_heads * (n + 9) * config.head_dim and cache.prefix == n


def test_the_null_half_may_be_left_out():
    net, tokens, place = build(SHAPES["class"]), torch.tensor([[3, 7], [1, 2]]), torch.arange(2)

    def fed(count: int):
        _, cache = net.prefill(net.prefix(torch.tensor([1, 4]), guided=True), 3, 4)
        return net.feed(net.tok_embeddings(tokens.repeat(2, 1))[:count], place, place + 1, cache, 3)

    torch.testing.assert_close(fed(2), fed(4)[:2], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", SHAPES)
def test_rows_that_are_fed_stay_as_they_are(name):
    """The blocks add to their input in place, which is a tensor of its own."""
    net = build(SHAPES[name])
    with torch.inference_mode():
        prefix = net.prefix(condition(SHAPES[name]))
        rows = prefix.clone()
        net.prefill(rows, 3, 9)
    assert torch.equal(rows, prefix)


@pytest.mark.parametrize("image", [0, 2])
def test_texts_of_a_batch_differ_in_length(image):
    """Whatever stands behind a text does not matter, in the prefill and in the passes behind it."""
    config = SHAPES["text"]
    net, texts, lengths = build(config), condition(config, 7), torch.tensor([3, 7])
    ragged, tokens = texts.clone(), torch.tensor([[2, 5, 7], [1, 4, 3]])
    ragged[0, 3:] = 1e3

    def run(texts, tokens, lengths=None):
        rows, tokens = net.prefix(texts, lengths, guided=True), torch.cat([tokens, tokens])
        lengths = None if lengths is None else lengths.repeat(2)
        first = net.tok_embeddings(tokens[:, :image]) if image else None
        hidden, cache = net.prefill(rows, 2, 3, lengths, first)
        place = torch.arange(image, 3)
        slot, end = place + cache.prefix, cache.prefix + 3
        mask = torch.arange(end) <= slot[:, None]
        return torch.cat([hidden, net.feed(net.tok_embeddings(tokens[:, place]), place, slot, cache, end, mask)], 1)

    joint = run(ragged, tokens, lengths)
    for i, n in enumerate(lengths.tolist()):
        torch.testing.assert_close(joint[i::2], run(texts[i : i + 1, :n], tokens[i : i + 1]), rtol=1e-4, atol=1e-4)


def test_prefix_keys_are_zero_and_so_are_transition_tokens():
    """Zeroed, not left unrotated: with rotation by nothing the image would see them by content."""
    net = build(SHAPES["par"])
    _, cache = net.prefill(net.prefix(torch.tensor([1])), 4, 15)
    special = net.spe_tok_embeddings.special_embeddings.weight[None]
    net.feed(special, torch.full((3,), -1), torch.arange(1, 4), cache, 4)
    for block in cache.blocks:
        keys, values = block[:, :, :4].chunk(2, 1)
        assert not keys.any() and values.abs().sum(-1).all()


@pytest.mark.parametrize("group", [1, 3])
@pytest.mark.parametrize("mask", ["", "causal", "drawn"])
def test_attention_sees_every_key_that_its_mask_shows(mask, group):
    g = torch.Generator().manual_seed(0)
    q, k, v = torch.randn(2, 6, 4, 8, generator=g), *(torch.randn(2, 6 // group, 4, 8, generator=g) for _ in range(2))
    every, drawn = torch.ones(4, 4, dtype=torch.bool), torch.rand(4, 4, generator=g) > 0.4
    seen = {"": every, "causal": every.tril(), "drawn": drawn | torch.eye(4, dtype=torch.bool)}[mask]
    wide = [t.repeat_interleave(group, 1) for t in (k, v)]
    scores = (q @ wide[0].transpose(2, 3) / 8**0.5).masked_fill(~seen, -torch.inf)
    want = (scores.softmax(-1) @ wide[1]).transpose(1, 2).flatten(2)
    torch.testing.assert_close(attend(q, k, v, seen if mask == "drawn" else None, causal=mask == "causal"), want)


def test_training_reaches_every_weight():
    net = initialise_llama(Llama(SHAPES["par"]))
    assert not net.output.weight.any() and 0.015 < float(net.tok_embeddings.weight.detach().std()) < 0.025
    torch.nn.init.normal_(net.output.weight)
    special = net.spe_tok_embeddings.special_embeddings.weight.expand(2, -1, -1)
    x = torch.cat(
        [net.prefix(torch.tensor([1, 2])), net.tok_embeddings(torch.tensor([[1, 2, 3, 4], [5, 6, 7, 8]])), special], 1
    )
    places = net.positions(4, 1)
    F.cross_entropy(net(x, torch.tensor([-1, 0, 2, 8, 10, -1, -1, -1]), places)[:, -1], torch.tensor([0, 1])).backward()
    assert all(p.grad is not None and p.grad.any() for p in net.parameters())
