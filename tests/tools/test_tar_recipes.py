"""The demo's Tar recipes: loadable files after a few steps, and training inputs equal to inference inputs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from fastar_nodes.model_loaders.autoencoders import load_vq
from fastar_nodes.model_loaders.networks.autoencoder import VQAutoencoder, VQConfig
from fastar_nodes.model_loaders.networks.llama import Llama, TokenModel
from fastar_nodes.model_loaders.networks.ta_tok import TATokConfig, TATokModel
from fastar_nodes.model_loaders.networks.tar import TarModel
from fastar_nodes.model_loaders.networks.upsampler import UpSampler, UpSamplerConfig
from fastar_nodes.model_loaders.tar import load_detokenizer, load_ta_tok, load_tar
from fastar_nodes.samplers.conditioning import CodeCondition
from fastar_nodes.samplers.driver import finish
from fastar_nodes.samplers.tokens.draws import PairedDraws
from fastar_nodes.samplers.tokens.llamagen import llamagen
from fastar_nodes.samplers.tokens.settings import DETAILS, LlamaGenSettings, TarPromptSettings
from fastar_nodes.samplers.tokens.tar import finish_prompt, tar_prompt
from fastar_nodes.tools.training import (
    captions,
    picture_book,
    ta_tok_recipe,
    tar_recipes,
    token_recipes,
    upsampler_recipe,
)
from fastar_nodes.tools.training.recipes import save_checkpoint
from fastar_nodes.tools.training.training import Schedule, generator

pytestmark = pytest.mark.slow

CPU = torch.device("cpu")
TINY = TATokConfig(
    width=24,
    code_width=8,
    codes=16,
    depth=1,
    heads=2,
    hidden=16,
    places=6,
    encoder_depth=1,
    encoder_heads=2,
    encoder_hidden=16,
    patch=4,
    side=6,
    input_size=24,
)
TINY_VQ = VQConfig(ch=8, ch_mult=(1, 1, 1, 1), blocks=1, z_channels=8, codes=32, groups=4)
FEW = Schedule(steps=4, batch=4, lr=1e-3, muon_lr=1e-3)
QUIET = {"log": lambda text: None}
PROMPTS = ["a red boat at sunset", "cat", "a large blue house in the middle by day"]


def small_language(codes: int = TINY.codes):
    return replace(tar_recipes.language_config(codes), dim=32, depth=2, heads=2, kv_heads=1, queries=32, hidden=32)


def small_detokenizer(grid: int):
    config = tar_recipes.detokenizer_config(grid, TINY.width, TINY.side, TINY_VQ.codes)
    return replace(config, dim=32, depth=2, heads=2, kv_heads=2, hidden=32)


def sharp(net: torch.nn.Module) -> torch.nn.Module:
    """Random weights with a dominant most likely value that depends on the whole input."""
    g = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for name, p in net.named_parameters():
            if p.ndim > 1:
                p.copy_(
                    torch.randn(p.shape, generator=g)
                    * (1 if "emb" in name or name == "abs_pe" else 3 * p.shape[1] ** -0.5)
                )
    return net.eval().requires_grad_(False)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> SimpleNamespace:
    """All files after a few steps each, trained on the loaded files, and the log."""
    folder, said = tmp_path_factory.mktemp("tar"), []
    about = {"device": CPU, "schedule": FEW, "count": 40, "log": said.append}
    torch.manual_seed(0)
    save_checkpoint(VQAutoencoder(TINY_VQ), folder / "vq.safetensors", family="vq", groups=4)
    vq = load_vq(folder / "vq.safetensors", "fp32")
    ta_tok_recipe.train_ta_tok(folder / "work", folder / "ta-tok.safetensors", config=TINY, **about)
    ta_tok = load_ta_tok(folder / "ta-tok.safetensors", "fp32")
    tar_recipes.train_language(
        ta_tok.net, folder / "work", folder / "tar.safetensors", config=small_language(), **about
    )
    for recipe in tar_recipes.DETOKENIZERS.values():
        out, config = folder / f"{recipe.name}.safetensors", small_detokenizer(recipe.grid)
        tar_recipes.train_detokenizer(recipe, ta_tok.net, vq.net, folder / "work", out, config=config, **about)
    return SimpleNamespace(
        folder=folder, said=said, vq=vq, ta_tok=ta_tok, tar=load_tar(folder / "tar.safetensors", "fp32")
    )


# ------------------------------------------------------------------------------------------------ files


def test_files_say_all_that_loading_needs(made) -> None:
    assert made.ta_tok.net.config == TINY and made.ta_tok.name == "picture book TA-Tok" and made.ta_tok.has_encoder
    assert made.tar.net.config == small_language() and made.tar.sides == (6, 3, 2) and made.tar.repetition_penalty == 1
    own = tar_recipes.tar_model(made.tar.net, TINY.codes)
    assert made.tar.special == own.special and made.tar.special.chat is not None
    for text in (*PROMPTS, "", "<|im_end|> <I3>", "\U0001f600"):
        assert made.tar.prompt(text, 1) == own.prompt(text, 1), "words are read as in training"
    for name, grid in (("dtok-low", 8), ("dtok", 16)):
        model = load_detokenizer(made.folder / f"{name}.safetensors", "fp32", ta_tok=made.ta_tok)
        assert (model.grid, model.label_set) == (grid, "picture-book") and model.net.config == small_detokenizer(grid)


def test_trainings_say_how_well_it_went(made) -> None:
    said = "\n".join(made.said)
    for scale in (36, 9, 4):
        assert f"ta-tok: {scale} codes: accuracy: label 0." in said
        assert f"tar: {scale} codes: " in said and f"dtok: {scale} codes: " in said


@pytest.mark.parametrize("scale", [0, 1, 2])
def test_a_prompt_becomes_a_picture(made, scale: int) -> None:
    settings = TarPromptSettings(detail=DETAILS[scale])
    prompted = finish_prompt(tar_prompt(made.tar, PROMPTS, settings, PairedDraws(1, range(3))))
    assert prompted.codes.shape == (3, made.tar.sides[scale] ** 2) and prompted.condition.size == TINY.codes
    model = load_detokenizer(made.folder / "dtok-low.safetensors", "fp32", ta_tok=made.ta_tok)
    codes = finish(llamagen(model, prompted.condition, LlamaGenSettings(cfg=2.0), PairedDraws(1, range(3)))).codes
    assert codes.shape == (3, 8, 8) and made.vq.net.decode_codes(codes).shape == (3, 3, 64, 64)


def test_a_trained_model_can_be_improved(made) -> None:
    """Training from given weights at a rate of zero returns them."""
    still, work = replace(FEW, steps=2, lr=0.0, muon_lr=0.0), made.folder / "again"
    again = tar_recipes.train_language(
        made.ta_tok.net,
        work,
        work / "tar.safetensors",
        CPU,
        still,
        10,
        config=small_language(),
        start=made.tar.net,
        **QUIET,
    )
    first = load_detokenizer(made.folder / "dtok-low.safetensors", "fp32").net
    low = tar_recipes.train_detokenizer(
        tar_recipes.DTOK_LOW,
        made.ta_tok.net,
        made.vq.net,
        work,
        work / "low.safetensors",
        CPU,
        still,
        10,
        config=small_detokenizer(8),
        start=first,
        **QUIET,
    )
    for old, new in ((made.tar.net, again), (first, low)):
        for name, value in old.state_dict().items():
            torch.testing.assert_close(new.state_dict()[name], value, msg=name)


def test_the_files_fit_the_parcel() -> None:
    """At most 6.8 MB in fp16 for all five files of Tar, their headers included."""
    ta_tok = ta_tok_recipe.build_ta_tok().net
    vq = SimpleNamespace(config=token_recipes.VQ)
    nets = [
        ta_tok,
        tar_recipes.build_language(),
        UpSampler(UpSamplerConfig(8, upsampler_recipe.WIDTH, upsampler_recipe.BLOCKS)),
    ]
    nets += [Llama(recipe.config(ta_tok, vq)) for recipe in tar_recipes.DETOKENIZERS.values()]
    numbers, names = (
        sum(f(t) for net in nets for t in net.state_dict().values()) for f in (torch.Tensor.numel, lambda _: 1)
    )
    assert 2 * numbers + 150 * names + 50_000 < 6.8e6
    for recipe in tar_recipes.DETOKENIZERS.values():
        assert recipe.grid * token_recipes.VQ.stride in token_recipes.VQ_PICTURES


# ------------------------------------------------------------------------------------------------ TA-Tok


@pytest.fixture(scope="module")
def pictures() -> tuple[torch.Tensor, torch.Tensor]:
    return ta_tok_recipe.ta_tok_book(12, size=TINY.input_size, **QUIET)


def test_the_book_holds_pictures_as_ta_tok_sees_them(pictures) -> None:
    s = picture_book.scenes(1, 12)
    full = torch.from_numpy(picture_book.render(s, 64)[0]).permute(0, 3, 1, 2).float() / 255
    seen, net = [], ta_tok_recipe.build_ta_tok(TINY).net.eval()
    net.encoder.embeddings.patch_embedding.register_forward_pre_hook(lambda _, given: seen.append(given[0]))
    with torch.no_grad():
        net.encode(full), net.encode(pictures[0].float() / 255)
    torch.testing.assert_close(seen[0], seen[1], atol=1.01 / 255, rtol=0)  # rounded to 256 levels of -1..1
    assert torch.equal(pictures[1][:, 0], torch.from_numpy(s.label)) and torch.equal(
        pictures[1][:, 2], torch.from_numpy(s.place)
    )
    assert all(int(pictures[1][:, i].max()) < values for i, values in enumerate(ta_tok_recipe.PARAMETERS.values()))


def test_training_sees_the_codes_that_use_sees(pictures) -> None:
    trainer = ta_tok_recipe.build_ta_tok(TINY).eval()
    x = pictures[0].float() / 255
    with torch.no_grad():
        codes = trainer(x)[2]
        for scale, (code, again) in enumerate(zip(codes, ta_tok_recipe.semantic_codes(trainer.net, x), strict=True)):
            torch.testing.assert_close(code, TATokModel(trainer.net, "").codes(x, scale + 1))
            assert torch.equal(code, again) and code.shape == (12, trainer.sides[scale] ** 2)


def test_the_heads_read_what_a_detokenizer_reads(pictures, monkeypatch: pytest.MonkeyPatch) -> None:
    """The decoded features, each of which predicts its own patch of the thumbnail."""
    trainer = ta_tok_recipe.build_ta_tok(TINY).eval()
    x = pictures[0].float() / 255
    with torch.no_grad():
        read, _, codes, _ = trainer(x)
        for logits, code in zip(read, codes, strict=True):
            torch.testing.assert_close(
                trainer.output_read(trainer.net.features(code).mean(1)), logits, atol=1e-4, rtol=1e-4
            )
        places = lambda rows: torch.arange(rows.shape[1])[None, :, None].expand(len(rows), -1, TINY.width).float()  # noqa: E731
        monkeypatch.setattr(trainer.net, "finish", places)
        for head in trainer.output_paint:
            head.weight.zero_()[:, 0] = 1
            head.bias.zero_()
        for picture, side in zip(trainer(x)[1], trainer.sides, strict=True):
            part = ta_tok_recipe.THUMBNAIL // side
            wanted = (
                torch.arange(side**2).view(side, side).repeat_interleave(part, 0).repeat_interleave(part, 1).float()
            )
            assert torch.equal(picture, wanted.expand(12, 3, -1, -1))
        head, part = trainer.output_paint[1], 4
        head.weight.zero_()
        head.bias.copy_(torch.arange(3 * part**2))
        tile = torch.arange(3 * part**2).view(3, part, part).float()
        assert torch.equal(trainer(x)[1][1][0, :, :4, :4], tile), "channels, then rows, then columns"


def test_every_part_learns_and_a_step_helps(pictures) -> None:
    torch.manual_seed(0)
    trainer = ta_tok_recipe.build_ta_tok(TINY)
    loss, figures = ta_tok_recipe.ta_tok_loss(trainer, *pictures)
    loss.backward()
    dead = [
        name
        for name, p in trainer.named_parameters()
        if p.grad is None or not float(p.grad.abs().sum()) and "k_proj.bias" not in name
    ]
    assert not dead, dead
    assert set(figures) == {"book", *(f"{what}{scale}" for what in ("nats", "error") for scale in range(3))}
    # Of the continuous part of the loss: the selected codes do not change.
    with torch.no_grad():
        norm = sum(float(p.grad.square().sum()) for p in trainer.output_read.parameters())
        for p in trainer.output_read.parameters():
            p -= 0.01 * p.grad / norm**0.5
    assert float(ta_tok_recipe.ta_tok_loss(trainer, *pictures)[0].detach()) < float(loss.detach())


def test_quantisation_passes_the_gradient_and_moves_both_sides(pictures, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ta_tok_recipe, "SPREAD", 0.0)
    trainer = ta_tok_recipe.build_ta_tok(TINY)
    book = trainer.net.bottleneck.regularizer.embedding.weight
    sees = trainer.net.encoder.embeddings.patch_embedding.weight
    read, _, _, towards = trainer(pictures[0].float() / 255)
    for logits in read:
        of_book, of_encoder = torch.autograd.grad(
            logits.square().sum(), (book, sees), retain_graph=True, allow_unused=True
        )
        assert of_book is None and float(of_encoder.abs().sum()) > 0, (
            "what reads the codes moves the encoder, not the codes"
        )
    moves = torch.autograd.grad(towards, (book, sees), retain_graph=True)
    assert all(float(g.abs().sum()) > 0 for g in moves), "codes and features move towards each other"
    monkeypatch.setattr(ta_tok_recipe, "COMMITMENT", 0.0)
    _, towards = trainer(pictures[0].float() / 255)[2:]
    moves = torch.autograd.grad(towards, (book, sees), allow_unused=True)
    assert float(moves[0].abs().sum()) > 0 and not float(moves[1].abs().sum()), (
        "features come less: by the commitment alone"
    )


def test_codes_that_are_chosen_alike_cost(pictures) -> None:
    """The codebook loss is smallest if all codes are used and each is selected with certainty."""
    even = torch.full((1, 16), 1 / 16)
    sure = torch.eye(16)
    assert float(ta_tok_recipe._entropy(even)) == pytest.approx(np.log(16), abs=1e-5)
    assert float(ta_tok_recipe._entropy(sure).max()) == pytest.approx(0, abs=1e-5)
    assert float(ta_tok_recipe._gap(sure, sure.roll(1, 0))) == pytest.approx(2)


def test_figures_count_what_is_read(pictures) -> None:
    trainer = ta_tok_recipe.build_ta_tok(TINY).eval()
    with torch.no_grad():
        trainer.output_read.weight.zero_()
        trainer.output_read.bias.zero_()
        trainer.output_read.bias[0] = 1.0  # the first value of every parameter
    for f in ta_tok_recipe.ta_tok_figures(trainer, *pictures, chunk=5):
        wanted = (pictures[1] == 0).float().mean(0).tolist()
        assert list(f.right.values()) == pytest.approx(wanted)
        assert 1 <= f.perplexity <= f.used + 1e-3 and f.used <= 16 and f.error > 0


# ------------------------------------------------------------------------------------------------ language model


@pytest.mark.parametrize("scale", [0, 1, 2])
def test_the_language_model_learns_what_it_will_be_asked(scale: int) -> None:
    """Greedy codes of the sampler are the argmax of teacher-forced sequences, with prompts of several lengths in one batch."""
    net = sharp(tar_recipes.build_language(small_language()))
    model = tar_recipes.tar_model(net, TINY.codes)
    settings = TarPromptSettings(detail=DETAILS[scale], top_k=1, top_p=1.0)
    codes = finish_prompt(tar_prompt(model, PROMPTS, settings, PairedDraws(0, range(3)))).codes
    assert len({tuple(row) for row in codes.tolist()}) == 3
    rows = [model.prompt(text, 0) for text in PROMPTS]
    lengths = torch.tensor([len(row) for row in rows])
    prompts = torch.tensor([row + [0] * (40 - len(row)) for row in rows])
    _, figures = tar_recipes.language_loss(net, model.special, prompts, lengths, codes, scale)
    assert float(figures[f"right{scale}"]) == 1
    other = (scale + 1) % 3
    _, figures = tar_recipes.language_loss(net, model.special, prompts, lengths, codes, other)
    assert float(figures[f"right{other}"]) < 1, "the scale is read"


def test_prompts_are_those_of_the_pictures() -> None:
    model = tar_recipes.tar_model(tar_recipes.build_language(small_language()), TINY.codes)
    prompts, lengths = tar_recipes.prompt_book(model, 30, variants=2, **QUIET)
    assert prompts.dtype == lengths.dtype == torch.int16 and prompts.shape[:2] == lengths.shape == (30, 2)
    s = picture_book.scenes(1, 30)
    for variant in range(2):
        for i, text in enumerate(captions.training_captions(s, 2 + variant)):
            row = prompts[i, variant].tolist()
            assert row[: lengths[i, variant]] == model.prompt(text, 0) and not any(row[lengths[i, variant] :])
    assert int(lengths.max()) == prompts.shape[2]


def test_a_step_draws_prompts_with_their_own_codes() -> None:
    books = [torch.arange(20, dtype=torch.int16)[:, None].expand(-1, n) for n in (36, 9, 4)]
    prompts = (
        torch.arange(20, dtype=torch.int16)[:, None, None].expand(-1, 3, 5) + torch.tensor([0, 100, 200])[None, :, None]
    )
    lengths = prompts[..., 0]
    variants, drawn = set(), set()
    for step in range(8):
        ids, ends, codes, scale = tar_recipes.language_batch(step, 16, books, prompts, lengths, generator(1, step), 12)
        assert scale == tar_recipes.SCALE_CYCLE[step % 4] and codes.shape == (16, (36, 9, 4)[scale])
        assert torch.equal(ids[:, 0] % 100, codes[:, 0]) and torch.equal(ids[:, 0], ends)
        variants |= set((ids[:, 0] // 100).tolist())
        drawn |= set(codes[:, 0].tolist())
    assert variants == {0, 1, 2} and drawn == set(range(12)), "pictures that are held back are not drawn"


def test_mistakes_are_few_and_drawn_by_row() -> None:
    codes = torch.full((2000, 36), 5)
    out = tar_recipes.corrupted(codes, 16, 0.1, generator(1, 0))
    assert float((out != 5).float().mean()) == pytest.approx(0.1 * 15 / 16, abs=0.01) and set(
        out.unique().tolist()
    ) == set(range(16))
    by_row = (out != 5).float().mean(1)
    assert float(by_row.var()) > 1.3 * 0.1 * 0.9 / 36, "some rows have more of them than others"
    assert torch.equal(tar_recipes.corrupted(codes, 16, 0.0, generator(1, 0)), codes)


def test_mistakes_are_read_but_never_to_be_written(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    model = tar_recipes.tar_model(tar_recipes.build_language(small_language()), TINY.codes)
    real = model.net.forward
    monkeypatch.setattr(model.net, "forward", lambda ids, span: seen.append(ids) or real(ids, span))
    monkeypatch.setattr(tar_recipes, "CONTEXT_ERRORS", 0.5)
    row = torch.tensor([model.prompt("cat", 0)])
    codes = torch.full((1, 36), 3)
    ends = torch.tensor([row.shape[1]])
    spoilt, _ = tar_recipes.language_loss(model.net, model.special, row, ends, codes, 0, generator(2, 0))
    read = seen[0][0, row.shape[1] :] - model.special.code
    assert len(read) == 35 and 0 < int((read != 3).sum()) < 35 and int(read.min()) >= 0 and int(read.max()) < TINY.codes
    logits = real(seen[0], model.span)[0, row.shape[1] - 1 :]
    torch.testing.assert_close(spoilt, torch.nn.functional.cross_entropy(logits, codes[0]))


# ------------------------------------------------------------------------------------------------ de-tokenizers


@pytest.mark.parametrize("scale", [0, 1, 2])
def test_a_detokenizer_learns_what_it_will_be_asked(scale: int) -> None:
    """Greedy tokens of the sampler, given codes, are the argmax of teacher-forced sequences."""
    ta_tok = sharp(ta_tok_recipe.build_ta_tok(TINY).net)
    net = sharp(Llama(small_detokenizer(8)))
    codes = torch.randint(16, (2, (36, 9, 4)[scale]), generator=torch.Generator().manual_seed(3))
    model = TokenModel(net, "sharp", 8, ta_tok=TATokModel(ta_tok, "sharp"))
    condition = CodeCondition(tuple(codes), ("one", "two"), TINY.codes)
    tokens = finish(
        llamagen(model, condition, LlamaGenSettings(cfg=1.0, top_k=1), PairedDraws(0, range(2)))
    ).codes.flatten(1)
    _, figures = tar_recipes.detokenizer_loss(net, ta_tok, codes, tokens)
    assert float(figures["right"]) == 1
    _, figures = tar_recipes.detokenizer_loss(net, ta_tok, codes.flip(0), tokens)
    assert float(figures["right"]) < 0.95, "the codes are read"


def test_now_and_then_the_condition_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Zero features, the null condition of guidance."""
    seen, real = [], tar_recipes.detokenizer_logits
    monkeypatch.setattr(tar_recipes, "detokenizer_logits", lambda *a: seen.append(a[1]) or real(*a))
    ta_tok, net = sharp(ta_tok_recipe.build_ta_tok(TINY).net), sharp(Llama(small_detokenizer(8)))
    codes, tokens = torch.randint(16, (400, 4)), torch.zeros(400, 64, dtype=torch.int64)
    tar_recipes.detokenizer_loss(net, ta_tok, codes, tokens, generator(1, 0))
    tar_recipes.detokenizer_loss(net, ta_tok, codes, tokens)
    left_out, none = ((f == 0).flatten(1).all(1) for f in seen)
    assert 20 <= int(left_out.sum()) <= 65 and not none.any()
    torch.testing.assert_close(seen[1], ta_tok.features(codes))
    kept = ~left_out
    same = (seen[0][kept] - seen[1][kept]).abs().flatten(1).amax(1) < 1e-5
    assert 0.5 < float(same.float().mean()) < 1, "codes of some pictures are wrong"
    rows = net.prefix(seen[1][:1], guided=True)
    torch.testing.assert_close(rows[1:], net.prefix(torch.zeros_like(seen[1][:1])))


def test_codes_and_tokens_are_of_the_same_pictures(made) -> None:
    semantic = tar_recipes.semantic_book(made.ta_tok.net, 7, CPU, chunk=3, **QUIET)
    rgb = picture_book.render(picture_book.scenes(1, 7), 64)[0]
    x = torch.from_numpy(rgb).permute(0, 3, 1, 2).float() / 255
    for scale, book in enumerate(semantic):
        assert book.dtype == torch.int16 and book.shape == (7, (36, 9, 4)[scale])
        torch.testing.assert_close(book.long(), made.ta_tok.codes(x, scale + 1))
    books = [torch.arange(9)[:, None].expand(-1, n) for n in (36, 9, 4, 64)]
    codes, tokens = tar_recipes.detokenizer_batch(2, 5, books[:3], books[3], generator(1, 2), 6)
    assert codes.shape == (5, 9) and torch.equal(codes[:, 0], tokens[:, 0]) and int(codes.max()) < 6


def test_the_tar_of_the_recipe_is_the_loaders(tmp_path: Path) -> None:
    """The full-size language model is unchanged by saving and loading, up to fp16."""
    net = tar_recipes.build_language()
    tar_recipes.save_language(net, tmp_path / "tar.safetensors")
    model = load_tar(tmp_path / "tar.safetensors", "fp32")
    assert (
        isinstance(model, TarModel)
        and model.net.config == net.config
        and model.special.codes == 256
        and model.sides == (6, 3, 2)
    )
    torch.testing.assert_close(
        model.net.tok_embeddings.weight, net.tok_embeddings.weight.detach(), atol=1e-3, rtol=1e-2
    )
