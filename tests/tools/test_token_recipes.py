"""The token recipes: a loadable tokenizer, GPT and PAR after a few steps, and training logits equal to decoding logits."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from fastar_nodes.model_loaders.autoencoders import load_vq
from fastar_nodes.model_loaders.llamagen import load_llamagen
from fastar_nodes.model_loaders.networks.autoencoder import KLAutoencoder, KLConfig, VQAutoencoder, VQConfig
from fastar_nodes.model_loaders.networks.llama import Llama, LlamaConfig, TokenModel
from fastar_nodes.samplers.conditioning import from_ids
from fastar_nodes.samplers.driver import finish
from fastar_nodes.samplers.tokens.draws import PairedDraws
from fastar_nodes.samplers.tokens.llamagen import llamagen
from fastar_nodes.samplers.tokens.par import par
from fastar_nodes.samplers.tokens.settings import LlamaGenSettings, PARSettings
from fastar_nodes.tools.training import token_recipes as recipes
from fastar_nodes.tools.training.training import Schedule

pytestmark = pytest.mark.slow

CPU = torch.device("cpu")
TINY_VQ = VQConfig(ch=8, ch_mult=(1, 1, 1, 1), blocks=1, z_channels=8, codes=32, groups=4)
TINY_GPT = LlamaConfig(dim=32, depth=2, heads=2, kv_heads=2, hidden=32, vocab=32, condition="class", condition_size=10)
FEW = Schedule(steps=3, batch=4, lr=1e-3, muon_lr=1e-3)
QUIET = {"log": lambda text: None}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory):
    """Its file after a few steps, and the log."""
    folder, said = tmp_path_factory.mktemp("vq"), []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(recipes, "VQ", TINY_VQ)
        recipes.train_vq(folder, folder / "vq.safetensors", CPU, FEW, count=20, log=said.append)
    return folder / "vq.safetensors", said


def test_the_tokenizer_is_written_loadable(tokenizer) -> None:
    path, said = tokenizer
    model = load_vq(path)
    assert model.net.config == TINY_VQ and model.name == "picture book VQ, stride 8"
    assert sum("pixels" in line for line in said) == 2, "both sizes are measured"
    with torch.no_grad():
        vectors, codes = model.net.encode(torch.zeros(1, 3, 64, 128))
    assert vectors.shape == (1, 8, 8, 16) and codes.shape == (1, 8, 16)


@pytest.mark.parametrize("special", [0, 3])
def test_a_gpt_is_written_loadable(tokenizer, tmp_path, special: int) -> None:
    recipe = replace(recipes.PAR, config=replace(TINY_GPT, special=special), name="gpt")
    vq = load_vq(tokenizer[0]).net
    net = recipes.train_gpt(recipe, vq, tmp_path, tmp_path / "gpt.safetensors", CPU, FEW, 20, **QUIET)
    model = load_llamagen(tmp_path / "gpt.safetensors", "fp32")
    assert (model.grid, model.regions, model.label_set, model.name) == (8, special + 1, "picture-book", recipe.title)
    assert model.net.config == recipe.config
    still = replace(FEW, lr=0.0, muon_lr=0.0)
    again = recipes.train_gpt(
        recipe, vq, tmp_path / "again", tmp_path / "again.safetensors", CPU, still, 20, start=net, **QUIET
    )
    for name, value in net.state_dict().items():
        torch.testing.assert_close(again.state_dict()[name], value, msg=name)


@pytest.mark.parametrize("special", [0, 3])
def test_tokens_are_learned_in_the_order_they_are_decided(
    tmp_path, monkeypatch: pytest.MonkeyPatch, special: int
) -> None:
    seen, real = [], recipes.sequence_logits
    cells = torch.arange(64, dtype=torch.int16).expand(5, -1)
    monkeypatch.setattr(recipes, "code_book", lambda *_: (cells, torch.arange(5)))
    monkeypatch.setattr(recipes, "sequence_logits", lambda *a: seen.append(a[3:]) or real(*a))
    recipe = replace(recipes.PAR, config=replace(TINY_GPT, special=special, vocab=64))
    recipes.train_gpt(recipe, None, tmp_path, tmp_path / "gpt.safetensors", CPU, replace(FEW, steps=8), 5, **QUIET)
    order = recipes.Layout.of(8, special + 1).order
    assert all(torch.equal(tokens, order.expand(4, -1)) for _, tokens in seen)
    labels = torch.cat([labels for labels, _ in seen]).tolist()
    assert 10 in labels and set(labels) - {10} <= set(range(5)), "now and then without a label"


def sharp(special: int) -> TokenModel:
    """Random weights with a dominant most likely token."""
    g = torch.Generator().manual_seed(special)
    net = Llama(replace(TINY_GPT, special=special)).eval().requires_grad_(False)
    for name, p in net.named_parameters():
        if p.ndim == 2:
            p.copy_(torch.randn(p.shape, generator=g) * (1 if "embed" in name else p.shape[1] ** -0.5))
    return TokenModel(net, "sharp", 8)


@pytest.mark.parametrize("special", [0, 3, 15])
def test_training_sees_what_decoding_sees(special: int) -> None:
    """Greedy tokens of the cached sampler are the argmax of the teacher-forced sequence."""
    model, condition, draws = sharp(special), from_ids([3, 7]), PairedDraws(0, range(2))
    run = par if special else llamagen
    settings = (PARSettings if special else LlamaGenSettings)(cfg=1.0, top_k=1)
    codes = finish(run(model, condition, settings, draws)).codes.flatten(1)
    layout = recipes.Layout.of(8, model.regions)
    tokens = codes[:, layout.order]
    logits = recipes.sequence_logits(model.net, layout, model.net.positions(8, 1), torch.tensor([3, 7]), tokens)
    assert torch.equal(logits.argmax(-1), tokens)
    assert sorted(layout.order.tolist()) == list(range(64)) and len(layout.place) == 64


def test_no_row_sees_what_it_predicts() -> None:
    """Changing a token changes only predictions of tokens that are decided later."""
    for special in (0, 3):
        model = sharp(special)
        layout, places = recipes.Layout.of(8, model.regions), model.net.positions(8, 1)
        tokens = torch.randint(32, (1, 64), generator=torch.Generator().manual_seed(1))
        before = recipes.sequence_logits(model.net, layout, places, torch.tensor([2]), tokens)
        for at in (0, 3, 4, 7, 30, 63):
            other = tokens.clone()
            other[0, at] = (other[0, at] + 1) % 32
            moved = (recipes.sequence_logits(model.net, layout, places, torch.tensor([2]), other) - before).abs().amax(
                (0, 2)
            ) > 1e-6
            n = model.regions
            end = at if n == 1 or at < n - 1 else max(n, at // n * n + n) - 1
            assert not moved[: end + 1].any(), (special, at)
            assert at == 63 or n > 1 and at >= 60 or moved[end + 1 :].any(), (special, at)


def test_a_tokenizer_can_begin_as_an_autoencoder() -> None:
    """Its features are the latents, and unit vectors are decoded as latents of unit variance in that direction."""
    torch.manual_seed(0)
    shape = {"ch": 8, "ch_mult": (1, 2), "blocks": 1, "groups": 4}
    kl, net = (
        KLAutoencoder(KLConfig(**shape, z_channels=8)).eval(),
        VQAutoencoder(VQConfig(**shape, z_channels=8, codes=16)).eval(),
    )
    recipes.initialise_from_kl(net, kl)
    x = torch.rand(2, 3, 16, 16) * 2 - 1
    with torch.no_grad():
        mean, _ = kl.encode(x)
        torch.testing.assert_close(net.features(x), mean, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(net.render(mean / 8**0.5), kl.decode(mean), rtol=1e-4, atol=1e-5)
    with pytest.raises(ValueError, match="an autoencoder of 4 channels does not fit codes of 8"):
        recipes.initialise_from_kl(net, KLAutoencoder(KLConfig(**shape, z_channels=4)))
    with pytest.raises(ValueError, match="does not fit"):
        recipes.initialise_from_kl(net, KLAutoencoder(KLConfig(ch=8, ch_mult=(1, 1), blocks=1, groups=4, z_channels=8)))


def test_quantisation_passes_the_gradient_and_moves_both_sides() -> None:
    torch.manual_seed(0)
    net = VQAutoencoder(TINY_VQ)
    features = torch.nn.functional.normalize(torch.randn(2, 8, 3, 3), dim=1).requires_grad_()
    vectors, codes, loss = recipes.quantisation_loss(net, features)
    torch.testing.assert_close(vectors, net.vectors(codes))
    straight = torch.randn(2, 8, 3, 3)
    (vectors * straight).sum().backward(retain_graph=True)
    assert torch.equal(features.grad, straight), "the decoder's gradient reaches the encoder unchanged"
    assert net.quantize.embedding.weight.grad is None
    loss.backward()
    assert float(net.quantize.embedding.weight.grad.abs().sum()) > 0


def test_idle_codes_are_revived() -> None:
    torch.manual_seed(0)
    module = recipes._Tokenizer(VQAutoencoder(TINY_VQ))
    features = torch.nn.functional.normalize(torch.randn(40, 8), dim=1)
    assert module.revive(features, torch.Generator().manual_seed(0)) == 32
    rows = {tuple(row) for row in features.tolist()}
    assert all(tuple(row) in rows for row in module.net.quantize.embedding.weight.tolist())
    for _ in range(recipes.PATIENCE):
        module.count_idle(torch.tensor([[0, 5]]))
    assert module.idle[[0, 5]].tolist() == [0, 0]
    kept = module.net.quantize.embedding.weight[[0, 5]].clone()
    assert module.revive(features, torch.Generator().manual_seed(1)) == 30
    assert torch.equal(module.net.quantize.embedding.weight[[0, 5]], kept)
    assert module.revive(features, torch.Generator().manual_seed(1)) == 0


def test_the_recipes_fit_the_parcel() -> None:
    """At most 8 MB in fp16 for the tokenizer and all GPTs."""
    with torch.device("meta"):
        nets = [VQAutoencoder(recipes.VQ), *(Llama(r.config) for r in recipes.RECIPES.values())]
    assert sum(2 * t.numel() for net in nets for t in net.state_dict().values()) < 7.9e6
    for r in recipes.RECIPES.values():
        assert r.grid * recipes.VQ.stride in recipes.VQ_PICTURES and r.config.vocab == recipes.VQ.codes
