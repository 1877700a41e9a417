"""The token recipes: training logits equal decoding logits; quantisation and the codebook."""

from dataclasses import replace

import pytest
import tiny_demo as tiny
import torch
from fastar_nodes.lab.training import token_recipes as recipes
from fastar_nodes.lab.training.training import Job, Schedule
from fastar_nodes.networks.autoencoder import KLAutoencoder, KLConfig, VQAutoencoder, VQConfig
from fastar_nodes.networks.llama import Llama, TokenModel
from fastar_nodes.samplers.conditioning import from_ids
from fastar_nodes.samplers.engine import finish
from fastar_nodes.samplers.tokens.llamagen import llamagen
from fastar_nodes.samplers.tokens.par import PARSettings, par
from fastar_nodes.samplers.tokens.settings import LlamaGenSettings
from fastar_nodes.samplers.tokens.token_noise import TokenNoise

pytestmark = pytest.mark.slow

TINY_GPT = replace(tiny.GPT_CONFIG, dim=32, depth=2, hidden=32)


@pytest.mark.parametrize("special", [0, 3])
def test_tokens_are_learned_in_the_order_they_are_decided(tmp_path, monkeypatch, special: int) -> None:
    seen, real = [], recipes.sequence_logits
    cells = torch.arange(64, dtype=torch.int16).expand(5, -1)
    none = torch.zeros(5, 64, 8), torch.zeros(5, 64, dtype=torch.bool)
    monkeypatch.setattr(recipes, "code_book", lambda *_: recipes.CodeBook(cells, torch.arange(5), *none))
    monkeypatch.setattr(recipes, "sequence_logits", lambda *a: seen.append(a[3:]) or real(*a))
    few = Schedule(steps=8, batch=4, lr=1e-3, muon_lr=1e-3)
    recipe = replace(recipes.PAR, config=replace(TINY_GPT, special=special, vocab=64), schedule=few)
    recipes.train_gpt(Job(tmp_path, images=5), tmp_path / "gpt.safetensors", recipe, VQAutoencoder(tiny.VQ))
    order = recipes.Layout.of(8, special + 1).order
    assert all(torch.equal(tokens, order.expand(4, -1)) for _, tokens in seen)
    labels = torch.cat([labels for labels, _ in seen]).tolist()
    assert 10 in labels and set(labels) - {10} <= set(range(5)), "now and then without a label"


def sharp(special: int) -> TokenModel:
    return TokenModel(tiny.sharp(Llama(replace(TINY_GPT, special=special)), special, 1.0), "sharp", 8)


@pytest.mark.parametrize("special", [0, 3, 15])
def test_training_sees_what_decoding_sees(special: int) -> None:
    """Greedy tokens of the cached sampler are the argmax of the teacher-forced sequence."""
    model, condition, draws = sharp(special), from_ids([3, 7]), TokenNoise(0, range(2))
    run = par if special else llamagen
    settings = (PARSettings if special else LlamaGenSettings)(cfg=1.0, top_k=1)
    codes = finish(run(model, condition, settings, draws)).latents.flatten(1)
    layout = recipes.Layout.of(8, model.regions)
    tokens = codes[:, layout.order]
    logits = recipes.sequence_logits(model.net, layout, model.net.positions(8, 1), torch.tensor([3, 7]), tokens)
    assert torch.equal(logits.argmax(-1), tokens)
    assert sorted(layout.order.tolist()) == list(range(64)) and len(layout.place) == 64


def test_a_tokenizer_can_begin_as_an_autoencoder() -> None:
    """Its features are the latents, and unit vectors are decoded as latents of unit variance in that direction."""
    torch.manual_seed(0)
    shape = {"ch": 8, "ch_mult": (1, 2), "blocks": 1, "groups": 4}
    kl = KLAutoencoder(KLConfig(**shape, z_channels=8)).eval()
    net = VQAutoencoder(VQConfig(**shape, z_channels=8, codes=16)).eval()
    recipes.initialise_from_kl(net, kl)
    x = torch.rand(2, 3, 16, 16) * 2 - 1
    with torch.no_grad():
        mean, _ = kl.encode(x)
        torch.testing.assert_close(net.features(x), mean, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(
            net.decoder(net.post_quant_conv(mean / 8**0.5)), kl.decode(mean), rtol=1e-4, atol=1e-5
        )
    with pytest.raises(ValueError, match="an autoencoder of 4 channels does not fit codes of 8"):
        recipes.initialise_from_kl(net, KLAutoencoder(KLConfig(**shape, z_channels=4)))
    with pytest.raises(ValueError, match="does not fit"):
        recipes.initialise_from_kl(net, KLAutoencoder(KLConfig(ch=8, ch_mult=(1, 1), blocks=1, groups=4, z_channels=8)))


def test_quantisation_passes_the_gradient_and_moves_both_sides() -> None:
    torch.manual_seed(0)
    net = VQAutoencoder(tiny.VQ)
    features = torch.nn.functional.normalize(torch.randn(2, 8, 3, 3), dim=1).requires_grad_()
    vectors, codes, loss = recipes.quantisation_loss(net, features)
    torch.testing.assert_close(vectors, net.vectors(codes))
    straight = torch.randn(2, 8, 3, 3)
    (vectors * straight).sum().backward(retain_graph=True)
    assert torch.equal(features.grad, straight), "the decoder's gradient reaches the encoder unchanged"
    assert net.quantize.embedding.weight.grad is None
    loss.backward()
    assert float(net.quantize.embedding.weight.grad.abs().sum()) > 0


def test_likely_codes_minimise_distance_and_nats() -> None:
    """Between 2 codes of equal probability the nearest; a farther one where its probability outweighs the distance."""
    features, vectors = torch.eye(2)[None, :1], torch.tensor([[1.0, 0.0], [0.8, 0.6], [0.0, 1.0]])
    for second in (0.0, 3.0, 4.0, 5.0, 9.0):
        logits = torch.tensor([[[0.0, second, second]]])
        for spread in (0.1, 0.22, 1.0):
            costs = [0.0, 0.4 / (2 * spread**2) - second, 2.0 / (2 * spread**2) - second]
            got = recipes.likely_codes(logits, features, vectors, torch.full((1, 1), spread))
            assert got.tolist() == [[costs.index(min(costs))]]


def test_the_second_stage_chooses_likely_codes(tmp_path, monkeypatch) -> None:
    """It begins with the nearest codes and goes on with choices of
    its own, which need fewer nats. It alone improves a trained model.
    """
    torch.manual_seed(0)
    vq = VQAutoencoder(tiny.VQ).eval()
    features = torch.nn.functional.normalize(torch.randn(16, 64, 8), dim=-1)
    nearest = (features @ vq.quantize.unit().T).argmax(-1)
    data = recipes.CodeBook(nearest.to(torch.int16), torch.arange(16) % 10, features, torch.rand(16, 64) < 0.3)
    monkeypatch.setattr(recipes, "code_book", lambda *_: data)
    monkeypatch.setattr(recipes, "SPREAD", (0.4, 0.8))
    seen, lines, real = [], [], recipes.sequence_logits
    monkeypatch.setattr(recipes, "sequence_logits", lambda *a: seen.append(a[4]) or real(*a))
    few = Schedule(steps=40, batch=16, lr=3e-3, decay=0.5)
    monkeypatch.setattr(recipes, "LIKELY", few)
    config = replace(TINY_GPT, vocab=tiny.VQ.codes)
    recipe = replace(recipes.GPT_LOW, name="gpt", config=config, schedule=few, likely=True)
    job = Job(tmp_path, images=16, log=lines.append)
    net = recipes.train_gpt(job, tmp_path / "gpt.safetensors", recipe, vq)
    same = [float((tokens[:, None] == nearest).float().mean(2).amax(1).min()) for tokens in seen]
    assert same[:41] == [1.0] * 41 and same[-1] < 1 and len(same) == 40 + recipes.ROUNDS + 40
    ends = [line for line in lines if "step 40/40" in line]
    first, second = (float(line.split("nats ")[1].split()[0]) for line in ends)
    assert second < first
    recipes.train_gpt(replace(job, folder=tmp_path / "again"), tmp_path / "gpt.safetensors", recipe, vq, net)
    assert len(seen) == len(same) + recipes.ROUNDS + 40


def test_half_of_the_sequences_are_misled_by_some_wrong_tokens() -> None:
    """Shares within 4 standard errors of what :data:`MISLED` says."""
    vectors = torch.nn.functional.normalize(torch.randn(64, 8, generator=torch.Generator().manual_seed(1)), dim=1)
    tokens = torch.arange(64).repeat(4000, 1)
    told, right = recipes.misled(tokens, vectors, torch.Generator().manual_seed(2))

    assert abs(float(right.float().mean()) - 0.5) < 4 * (0.25 / 4000) ** 0.5
    assert torch.equal(told[right], tokens[right])
    # Half of the sequences, a mean share of MISLED / 2, and 1 of 128 of the replaced tokens is the old one by chance.
    expected = recipes.MISLED / 4 * (1 - 1 / 128)
    assert abs(float((told != tokens).float().mean()) / expected - 1) < 0.08

    # Half of the wrong tokens are near: nearer than codes at random by far more than chance.
    wrong = told != tokens
    similarity = (vectors[told] * vectors[tokens]).sum(-1)[wrong]
    assert float(similarity.mean()) > 0.2


def test_a_target_chooses_codes_that_it_finds_likelier() -> None:
    """They are as near as the spread allows, need fewer nats than the nearest, and are the same again."""
    torch.manual_seed(0)
    vq = VQAutoencoder(tiny.VQ).eval()
    net = Llama(replace(TINY_GPT, vocab=tiny.VQ.codes)).eval()
    for weight in net.parameters():
        torch.nn.init.normal_(weight, std=0.3)
    features = torch.nn.functional.normalize(torch.randn(4, 8, 8, 8), dim=1)

    choose = recipes.LikelyCodes(net, 8, vq)
    nearest, chosen = vq.codes(features), choose(features)
    assert torch.equal(chosen, choose(features)) and not torch.equal(chosen, nearest)

    labels = torch.full((4,), net.config.condition_size)
    layout, places = recipes.Layout.of(8), net.positions(8, 1)

    def nats(codes: torch.Tensor) -> float:
        tokens = codes.flatten(1)
        logits = recipes.sequence_logits(net, layout, places, labels, tokens)
        return float(torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens.flatten()))

    assert nats(chosen) < nats(nearest)
    similar = [(vq.vectors(codes) * features).sum(1).mean() for codes in (chosen, nearest)]
    assert 0 < similar[0] < similar[1]
