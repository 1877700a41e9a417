"""The hybrid's recipe: a loadable file after a few steps, training inputs equal to inference inputs, and weights to start from."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from fastar_nodes.model_loaders.hybrid import load_hybrid
from fastar_nodes.model_loaders.networks.autoencoder import KLAutoencoder, KLConfig
from fastar_nodes.model_loaders.networks.mar import MAR, MARConfig, pick
from fastar_nodes.model_loaders.networks.mar import initialise as initialise_mar
from fastar_nodes.model_loaders.networks.prompts import UNCONDITIONAL
from fastar_nodes.samplers.conditioning import PromptCondition
from fastar_nodes.samplers.driver import finish
from fastar_nodes.samplers.mar.diffusion import tables
from fastar_nodes.samplers.mar.mar import mar
from fastar_nodes.samplers.mar.settings import MARSettings
from fastar_nodes.samplers.noise import PairedNoise
from fastar_nodes.tools.training import captions, hybrid_recipe, picture_book, recipes, tar_recipes
from fastar_nodes.tools.training.training import Schedule, generator

CPU = torch.device("cpu")
TINY_KL = KLConfig(ch=8, ch_mult=(1, 1, 1, 1), blocks=1, z_channels=2, groups=4)
TINY = MARConfig(
    dim=32,
    encoder_depth=1,
    decoder_depth=1,
    heads=2,
    buffer=2,
    tokens=64,
    channels=2,
    classes=10,
    head_depth=1,
    head_width=16,
)
LLM = dict(dim=32, depth=2, heads=2, kv_heads=1, queries=32, hidden=32)
FEW = Schedule(steps=4, batch=4, lr=1e-3, muon_lr=1e-3)
PROMPTS = ["a red boat at sunset", "cat", "", "a lovely blue house in the middle by day."]

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("one_thread")]


def small():
    shape = hybrid_recipe.config()
    return replace(shape, mar=replace(TINY, classes=0), llm=replace(shape.llm, **LLM))


@pytest.fixture(scope="module")
def parts() -> SimpleNamespace:
    """A random autoencoder, MAR and Tar of the hybrid's shapes, and the hybrid that starts from them."""
    torch.manual_seed(0)
    kl, net = KLAutoencoder(TINY_KL).eval(), initialise_mar(MAR(TINY)).eval()
    tar = tar_recipes.tar_model(tar_recipes.build_language(replace(tar_recipes.language_config(16), **LLM)), 16)
    return SimpleNamespace(kl=kl, mar=net, tar=tar, start=hybrid_recipe.joined(net, tar, small()))


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory, parts) -> SimpleNamespace:
    """A trained file and its model."""
    folder: Path = tmp_path_factory.mktemp("hybrid")
    out = folder / "hybrid.safetensors"
    net = hybrid_recipe.train_hybrid(
        parts.kl, folder / "work", out, CPU, FEW, FEW, 40, log=lambda text: None, start=parts.start
    )
    return SimpleNamespace(folder=folder, net=net, model=load_hybrid(out, "fp32"))


def test_the_file_says_all_that_loading_needs(made) -> None:
    model, own = made.model, hybrid_recipe.hybrid_model(made.net)
    assert model.hybrid.config == small() and (model.name, model.trained) == ("picture book hybrid", 8)
    assert (
        (model.latent_scale, model.t_max, model.max_beta)
        == (own.latent_scale, own.t_max, own.max_beta)
        == (1, 950, 0.999)
    )
    for text in (*PROMPTS, "<|im_end|>", "\ud800"):
        assert model.prompt(text) == own.prompt(text), "words are read as in training"
    assert model.instruction(UNCONDITIONAL) == own.instruction(UNCONDITIONAL)
    for key, value in made.net.state_dict().items():
        assert torch.equal(model.hybrid.state_dict()[key], value.half().float()), key


def test_the_words_of_captions_and_template_are_known(made) -> None:
    unknown = hybrid_recipe.tokenizer().encode("zebra")[0]
    texts = captions.training_captions(picture_book.scenes(1, 300), 5)
    known = [text for text in texts if captions._STRANGE not in text]
    assert len(known) > 200 and not any(unknown in made.model.prompt(text) for text in known)
    assert unknown not in made.model.instruction(UNCONDITIONAL) and unknown in made.model.prompt("a lovely cat")


def test_a_prompt_becomes_a_picture(made) -> None:
    settings = MARSettings(ar_steps=3, diffusion_steps=3, cfg=2.0)
    sampled = finish(mar(made.model, PromptCondition(tuple(PROMPTS)), settings, PairedNoise(1, range(4)), 1))
    assert sampled.latents.shape == (4, 2, 8, 8) and torch.isfinite(sampled.latents).all()


def test_training_starts_at_the_unlabelled_mar_with_tars_words(parts) -> None:
    net, tar = parts.start, parts.tar
    tokens = torch.randn(2, 64, 2)
    known = torch.arange(10).expand(2, -1)
    model = hybrid_recipe.hybrid_model(net)
    ids = torch.tensor([model.prompt("a red cat"), model.prompt("a blue boat")])
    lengths = torch.full((2,), ids.shape[1])
    with torch.no_grad():
        z = net(tokens, known, ids, lengths)
        plain = parts.mar.decode(parts.mar.encode(tokens, known, parts.mar.class_rows(None, 2)), known)
    assert torch.equal(z, plain)
    table, own = net.llm.tok_embeddings.weight, tar.net.tok_embeddings.weight
    for text in ("red", "sunset", "cat"):
        (here,), (there,) = model.tokenize(text), tar.tokenize(text)
        assert torch.equal(table[here], own[there])
    assert torch.equal(table[list(model.turn)], own[list(tar.special.chat)])
    assert torch.equal(net.llm.layers[1].feed_forward.w3.weight, tar.net.layers[1].feed_forward.w3.weight)


def test_some_prompts_of_a_batch_are_the_unconditional_one(parts) -> None:
    model = hybrid_recipe.hybrid_model(parts.start)
    prompts, lengths = hybrid_recipe.prompt_book(model, 30, 2)
    blank = torch.tensor(model.instruction(UNCONDITIONAL))
    book = torch.arange(30.0)[:, None, None].expand(-1, 64, 2).half()
    tokens, ids, ends = hybrid_recipe.batch_of(book, prompts, lengths, blank, 400, generator(1, 0))
    null = [row[:end].tolist() == blank.tolist() for row, end in zip(ids, ends, strict=True)]
    assert 20 < sum(null) < 65
    rows = tokens[:, 0, 0].long()
    for i in range(400):
        mine = ids[i, : ends[i]].tolist()
        assert null[i] or mine in [prompts[rows[i], v, : lengths[rows[i], v]].tolist() for v in range(2)]
    s = picture_book.scenes(recipes.TRAIN_SEED, 30)
    first = captions.training_captions(s, hybrid_recipe.CAPTION_SEED)[4]
    assert prompts[4, 0, : lengths[4, 0]].tolist() == model.prompt(first)


def test_the_loss_depends_on_the_prompt_and_reaches_every_weight(parts) -> None:
    net = hybrid_recipe.build(small())
    torch.nn.init.normal_(net.proj_out[2].weight, std=0.1)
    torch.nn.init.normal_(net.head.final_layer.linear.weight, std=0.1)
    for block in (*net.head.res_blocks, net.head.final_layer):
        torch.nn.init.normal_(block.adaLN_modulation[1].weight, std=0.1)
    model = hybrid_recipe.hybrid_model(net)
    tokens, full = torch.randn(2, 64, 2, generator=torch.Generator().manual_seed(1)), tables()

    def loss(*texts: str) -> torch.Tensor:
        ids = torch.tensor([model.prompt(text) for text in texts])
        return hybrid_recipe.hybrid_loss(net, tokens, ids, torch.tensor([ids.shape[1]] * 2), full, generator(3, 3))[0]

    first = loss("a red cat", "a blue boat")
    assert float(first.detach()) != float(loss("a blue boat", "a red cat").detach())
    first.backward()
    still = [name for name, p in net.named_parameters() if p.grad is None or not p.grad.abs().sum() > 0]
    assert not still, still


def test_the_first_stage_trains_the_prompts_alone(parts) -> None:
    """Its error is zero for the encoder's output of the whole picture; the MAR gets no gradient."""
    net = hybrid_recipe.build(small())
    net.mar.load_state_dict(parts.start.mar.state_dict())
    net.mar.requires_grad_(False)
    torch.nn.init.normal_(net.proj_out[2].weight, std=0.1)
    model = hybrid_recipe.hybrid_model(net)
    tokens = torch.randn(2, 64, 2, generator=torch.Generator().manual_seed(1))
    ids = torch.tensor([model.prompt("a red cat"), model.prompt("a blue boat")])

    def error() -> torch.Tensor:
        return hybrid_recipe.whole_loss(net, tokens, ids, torch.tensor([ids.shape[1]] * 2), generator(3, 5))[0]

    before = error()
    before.backward()
    assert all(p.grad is None for p in net.mar.parameters())
    assert float(net.llm.layers[0].attention.wq.weight.grad.abs().sum()) > 0

    def whole(encoded, known, *prompts):
        rows = net.mar.encode(tokens, torch.arange(64).expand(2, -1), net.mar.class_rows(None, 2))
        return torch.cat([rows[:, :2], pick(rows, known + 2)], 1)

    net.fuse_ids = whole
    assert float(before.detach()) > 0.01 and float(error()) < 1e-12


def test_the_weight_of_high_timesteps_is_limited() -> None:
    full, g = tables(), torch.Generator().manual_seed(2)
    x0, noise = torch.randn(2, 6, 3, generator=g).unbind(0)
    out = torch.randn(6, 6, generator=g)

    def mse(t: int, most: float) -> float:
        return float(recipes.diffusion_loss(out, x0, x0, noise, torch.full((6,), t), full, most)[0])

    plain = mse(100, 1)
    assert mse(100, 10) == pytest.approx(plain) and mse(990, 10) == pytest.approx(10 * plain)
    a = float(full.alphas_cumprod[700])
    assert mse(700, 10) == pytest.approx((1 - a) / a * plain, rel=1e-4) and 1 < (1 - a) / a < 10
