"""The GPT: shapes from names, the cache against the uncached pass, and products that go another way on a CPU."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from fastar_nodes.model_loaders.networks import layers
from fastar_nodes.model_loaders.networks.attention import attend
from fastar_nodes.model_loaders.networks.gpt import GPT, GPTConfig, initialise
from fastar_nodes.model_loaders.networks.ops import Linear

SHAPES = {
    "class": GPTConfig(32, 3, 4, 4, 48, 19, "class", 5),
    "class, absolute": GPTConfig(32, 2, 4, 4, 48, 19, "class", 5, absolute=16),
    "text": GPTConfig(32, 2, 4, 4, 48, 19, "text", 6, text_rows=7),
    "features, grouped heads": GPTConfig(32, 2, 4, 2, 48, 19, "features", 6, absolute=40),
    "codes": GPTConfig(32, 2, 4, 1, 48, 19, "codes", 9, absolute=40),
    "par": GPTConfig(32, 2, 4, 4, 48, 19, "class", 5, special=3),
}

pytestmark = pytest.mark.usefixtures("one_thread")


def build(config: GPTConfig, seed: int = 0) -> GPT:
    net = GPT(config).eval().requires_grad_(False)
    g = torch.Generator().manual_seed(seed)
    for p in net.state_dict().values():
        p.copy_(torch.randn(p.shape, generator=g) * (1.0 if p.ndim == 1 else 0.4))
    return net


def condition(config: GPTConfig, rows: int = 4) -> torch.Tensor:
    if config.condition == "class":
        return torch.tensor([1, 4])
    if config.condition == "codes":
        return torch.arange(2 * rows).view(2, -1) % config.condition_size
    return torch.randn(2, rows, config.condition_size, generator=torch.Generator().manual_seed(3))


@pytest.mark.parametrize("name", SHAPES)
def test_the_state_dict_says_its_own_shape(name):
    config = SHAPES[name]
    state = GPT(config).state_dict()
    assert GPTConfig.from_state_dict(state, heads=4) == config
    GPT(GPTConfig.from_state_dict(state, 4)).load_state_dict(build(config).state_dict(), strict=True)


def test_shapes_that_make_no_sense_are_refused():
    state = GPT(SHAPES["class"]).state_dict()
    for heads, sentence in (
        (None, "width 32 is none of the official"),
        (5, "heads: 5 does not fit"),
        (16, "heads: 16 does not fit"),
    ):
        with pytest.raises(ValueError, match=sentence):
            GPTConfig.from_state_dict(state, heads)
    with pytest.raises(ValueError, match="heads: 1 does not fit the attention weights"):
        GPTConfig.from_state_dict(GPT(SHAPES["codes"]).state_dict(), 1)
    with pytest.raises(KeyError, match="cls_embedding"):
        GPTConfig.from_state_dict({k: v for k, v in state.items() if not k.startswith("cls_")}, 4)
    with pytest.raises(KeyError, match="tok_embeddings"):
        GPTConfig.from_state_dict({})


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("pieces", [[1] * 9, [4, 5], [1, 3, 5]], ids=str)
def test_cached_logits_are_the_uncached_ones(name, pieces):
    """The same tokens one by one, or several at once with a causal mask, written by position into one cache."""
    config = SHAPES[name]
    net, tokens = build(config), torch.randint(config.vocab, (2, 9), generator=torch.Generator().manual_seed(1))
    prefix = net.prefix(condition(config), guided=True)
    halves, n = torch.cat([tokens, tokens]), prefix.shape[1]
    whole = net(torch.cat([prefix, net.embed(halves)], 1), torch.arange(-n, 9), net.positions(3, n))[:, n - 1 :]
    first, cache = net.prefill(prefix, 3, 9)
    out, at = [first[:, None]], 0
    for count in pieces:
        place = torch.arange(at, at + count)
        slot, end = place + cache.prefix, cache.prefix + at + count
        mask = torch.arange(end) <= slot[:, None]
        out.append(net.step(net.embed(halves[:, place]), place, slot, cache, end, mask=None if count == 1 else mask))
        at += count
    torch.testing.assert_close(torch.cat(out, 1), whole, rtol=1e-4, atol=1e-4)
    assert cache.bytes == 4 * sum(
        2 * 4 * config.kv_heads * (cache.prefix + 9) * config.head_dim for _ in range(config.depth)
    )
    assert cache.prefix == (n if config.absolute else 1)


def test_rows_that_are_not_wanted_are_not_computed_and_the_null_half_may_be_left_out():
    net = build(SHAPES["class"])
    tokens = torch.tensor([[3, 7], [1, 2]])
    place = torch.arange(2)

    def step(count: int, **which):
        _, cache = net.prefill(net.prefix(torch.tensor([1, 4]), guided=True), 3, 4)
        return net.step(net.embed(tokens.repeat(2, 1))[:count], place, place + 1, cache, 3, **which)

    both = step(4)
    torch.testing.assert_close(step(4, rows=torch.tensor([1])), both[:, 1:])
    torch.testing.assert_close(step(2), both[:2], rtol=1e-5, atol=1e-5)


def test_a_text_takes_one_slot_whatever_its_length_and_padding():
    config = SHAPES["text"]
    net, texts = build(config), condition(config, 7)
    lengths = torch.tensor([3, 7])
    ragged = texts.clone()
    ragged[0, 3:] = torch.nan  # whatever stands behind a text must not matter
    rows = net.prefix(ragged.nan_to_num(1e3), lengths, guided=True)
    logits, cache = net.prefill(rows, 2, 3, lengths.repeat(2))
    assert cache.prefix == 1 and not any(k[:, :, 0].any() for k in cache.keys)
    for i, n in enumerate(lengths.tolist()):
        alone, own = net.prefill(net.prefix(texts[i : i + 1, :n], guided=True), 2, 3)
        for half in range(2):
            torch.testing.assert_close(logits[2 * half + i], alone[half], rtol=1e-5, atol=1e-5)
            torch.testing.assert_close(
                cache.values[1][2 * half + i, :, 0], own.values[1][half, :, 0], rtol=1e-5, atol=1e-5
            )


def test_prefix_keys_are_zero_and_so_are_transition_tokens():
    """Zeroed, not left unturned: with rotation by nothing the picture would see them by content."""
    net = build(SHAPES["par"])
    _, cache = net.prefill(net.prefix(torch.tensor([1])), 4, 15)
    special = net.special_rows()[None]
    net.step(special, torch.full((3,), -1), torch.arange(1, 4), cache, 4)
    assert not any(k[:, :, :4].any() for k in cache.keys)
    assert all(v[:, :, :4].abs().sum(-1).all() for v in cache.values)


@pytest.mark.parametrize("mask", [None, "causal", "drawn"])
def test_grouped_heads_are_repeated_keys(mask):
    g = torch.Generator().manual_seed(0)
    q, k, v = (
        torch.randn(2, 6, 4, 8, generator=g),
        torch.randn(2, 2, 4, 8, generator=g),
        torch.randn(2, 2, 4, 8, generator=g),
    )
    drawn = torch.rand(4, 4, generator=g) > 0.4
    drawn |= torch.eye(4, dtype=torch.bool)
    repeated = [x.repeat_interleave(3, dim=1) for x in (k, v)]
    seen = {None: None, "causal": torch.ones(4, 4, dtype=torch.bool).tril(), "drawn": drawn}[mask]
    want = F.scaled_dot_product_attention(q, *repeated, attn_mask=seen).transpose(1, 2).flatten(2)
    got = attend(q, k, v, drawn if mask == "drawn" else None, causal=mask == "causal")
    torch.testing.assert_close(got, want)


def test_training_reaches_every_weight():
    net = initialise(GPT(SHAPES["par"]))
    assert not net.output.weight.any() and 0.015 < float(net.tok_embeddings.weight.detach().std()) < 0.025
    torch.nn.init.normal_(net.output.weight)
    special = net.special_rows().expand(2, -1, -1)
    x = torch.cat([net.prefix(torch.tensor([1, 2])), net.embed(torch.tensor([[1, 2, 3, 4], [5, 6, 7, 8]])), special], 1)
    places = net.positions(4, 1)
    F.cross_entropy(net(x, torch.tensor([-1, 0, 2, 8, 10, -1, -1, -1]), places)[:, -1], torch.tensor([0, 1])).backward()
    assert all(p.grad is not None and p.grad.any() for p in net.parameters())


def test_half_precision_stays_close():
    config = SHAPES["class"]
    net, tokens = build(config), torch.tensor([[3, 7, 1]])

    def logits(n: GPT) -> torch.Tensor:
        x = torch.cat([n.prefix(torch.tensor([2])), n.embed(tokens)], 1)
        return n(x, torch.arange(-1, 3), n.positions(2, 1))

    exact = logits(net)
    rough = logits(build(config).to(torch.bfloat16))
    assert rough.dtype == torch.float32 and float((rough - exact).abs().max()) < 0.15 * float(exact.abs().max())


@pytest.mark.parametrize("group", [1, 2])
def test_attention_sees_every_key_unless_it_is_causal(group):
    g = torch.Generator().manual_seed(0)
    q, k, v = torch.randn(1, 4, 3, 8, generator=g), *(torch.randn(1, 4 // group, 3, 8, generator=g) for _ in range(2))
    wide = [t.repeat_interleave(group, 1) for t in (k, v)]
    scores = q @ wide[0].transpose(2, 3) / 8**0.5
    for causal in (False, True):
        seen = scores.masked_fill(~torch.ones(3, 3, dtype=torch.bool).tril(), -torch.inf) if causal else scores
        want = (seen.softmax(-1) @ wide[1]).transpose(1, 2).flatten(2)
        got = attend(q, k, v, causal=True) if causal else attend(q, k, v)
        torch.testing.assert_close(got, want)


@pytest.mark.parametrize("merged", [True, False])
@pytest.mark.parametrize("name", SHAPES)
def test_a_serial_cache_gives_the_results_of_a_plain_one(name, merged, monkeypatch):
    """Token after token, as on a GPU; also where a layer's weights are elsewhere, and with the null half left out from the third on."""
    monkeypatch.setattr(layers, "fused", lambda layer, x: merged and type(layer) is Linear)
    config = SHAPES[name]
    net = build(config)
    start, tokens = condition(config), torch.arange(2 * 6).view(2, 6) % config.vocab
    found = {}
    for serial in (False, True):
        make = net._cache
        monkeypatch.setattr(net, "_cache", lambda *a, make=make, serial=serial: make(*a[:-1], serial))
        with torch.inference_mode():
            prefix = net.prefix(start, guided=True)
            lengths = torch.tensor([4, 3, 4, 3]) if config.condition == "text" else None
            out, cache = net.prefill(prefix, 4, 8, lengths)
            assert (cache.rows is not None) == serial
            logits = [out]
            for k in range(6):
                x = net.embed(torch.cat([tokens, tokens] if k < 3 else [tokens])[:, k : k + 1])
                at = torch.tensor([k])
                logits.append(net.step(x, at, at + cache.prefix, cache, cache.prefix + k + 1, last=True))
            # Then two rows at once, which are no serial pass.
            at = torch.tensor([6, 7])
            x = net.embed(tokens[:, :2])
            logits.append(
                net.step(
                    x,
                    at,
                    at + cache.prefix,
                    cache,
                    cache.prefix + 8,
                    mask=torch.ones(2, cache.prefix + 8).tril(cache.prefix + 6).bool(),
                )
            )
            pairs = [pair.clone() for pair in cache.pairs]
        monkeypatch.setattr(net, "_cache", make)
        found[serial] = logits, pairs
    for one, other in zip(found[True][0] + found[True][1], found[False][0] + found[False][1], strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)
