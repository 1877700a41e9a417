"""The demo's Tar recipes: training inputs equal inference inputs, and what the losses reach."""

from pathlib import Path

import numpy as np
import pytest
import tiny_demo as tiny
import torch
from fastar_nodes.lab.training import picture_book, ta_tok_recipe, tar_recipes
from fastar_nodes.lab.training.training import Job, generator
from fastar_nodes.networks.llama import Llama, TokenModel
from fastar_nodes.networks.ta_tok import TATokModel
from fastar_nodes.samplers.conditioning import CodeCondition
from fastar_nodes.samplers.engine import finish
from fastar_nodes.samplers.tokens.draws import PairedDraws
from fastar_nodes.samplers.tokens.llamagen import llamagen
from fastar_nodes.samplers.tokens.settings import DETAILS, LlamaGenSettings, TarPromptSettings
from fastar_nodes.samplers.tokens.tar import tar_prompt

pytestmark = pytest.mark.slow
TINY = tiny.TA_TOK
PROMPTS = ["a red boat at sunset", "cat", "a large blue house in the middle by day"]
JOB = Job(Path("unused"))


def small_ta_tok() -> torch.nn.Module:
    return tiny.sharp(ta_tok_recipe.build_ta_tok(TINY).net)


def small_language() -> torch.nn.Module:
    return tar_recipes.build_language(tiny.language())


@pytest.fixture(scope="module")
def pictures() -> tuple[torch.Tensor, torch.Tensor]:
    return ta_tok_recipe.ta_tok_book(JOB, 12, 1, TINY.input_size)


def test_the_book_holds_pictures_as_ta_tok_sees_them(pictures) -> None:
    s = picture_book.scenes(1, 12)
    full = torch.from_numpy(picture_book.render(s, 64)[0]).permute(0, 3, 1, 2).float() / 255
    seen, net = [], ta_tok_recipe.build_ta_tok(TINY).net.eval()
    net.encoder.embeddings.patch_embedding.register_forward_pre_hook(lambda _, given: seen.append(given[0]))
    with torch.no_grad():
        net.encode(full), net.encode(pictures[0].float() / 255)
    torch.testing.assert_close(seen[0], seen[1], atol=1.01 / 255, rtol=0)  # rounded to 256 levels of -1..1
    assert torch.equal(pictures[1][:, [0, 2]].T, torch.from_numpy(np.stack([s.label, s.place])))
    assert all(int(pictures[1][:, i].max()) < values for i, values in enumerate(ta_tok_recipe.PARAMETERS.values()))


def test_training_sees_the_codes_that_use_sees(pictures) -> None:
    trainer = ta_tok_recipe.build_ta_tok(TINY).eval()
    x = pictures[0].float() / 255
    with torch.no_grad():
        codes = trainer(x)[2]
        for scale, (code, again) in enumerate(zip(codes, ta_tok_recipe.semantic_codes(trainer.net, x), strict=True)):
            torch.testing.assert_close(code, TATokModel(trainer.net, "").codes(x, scale + 1))
            assert torch.equal(code, again) and code.shape == (12, trainer.sides[scale] ** 2)


def test_every_part_learns_and_a_step_helps(pictures) -> None:
    torch.manual_seed(0)
    trainer = ta_tok_recipe.build_ta_tok(TINY)
    loss, _ = ta_tok_recipe.ta_tok_loss(trainer, *pictures)
    loss.backward()
    learning = {name for name, p in trainer.named_parameters() if p.grad is not None and p.grad.any()}
    assert not {name for name, _ in trainer.named_parameters() if "k_proj.bias" not in name} - learning
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
        options = {"retain_graph": True, "allow_unused": True}
        of_book, of_encoder = torch.autograd.grad(logits.square().sum(), (book, sees), **options)
        assert of_book is None and of_encoder.any(), "what reads the codes moves the encoder, not the codes"
    moves = torch.autograd.grad(towards, (book, sees), retain_graph=True)
    assert all(float(g.abs().sum()) > 0 for g in moves), "codes and features move towards each other"
    monkeypatch.setattr(ta_tok_recipe, "COMMITMENT", 0.0)
    _, towards = trainer(pictures[0].float() / 255)[2:]
    moves = torch.autograd.grad(towards, (book, sees), allow_unused=True)
    assert moves[0].any() and not moves[1].any(), "features come less: by the commitment alone"


@pytest.mark.parametrize("scale", [0, 1, 2])
def test_the_language_model_learns_what_it_will_be_asked(scale: int) -> None:
    """Greedy codes of the sampler are the argmax of teacher-forced
    sequences, with prompts of several lengths in one batch.
    """
    net = tiny.sharp(small_language())
    model = tar_recipes.tar_model(net, TINY.codes)
    settings = TarPromptSettings(detail=DETAILS[scale], top_k=1, top_p=1.0)
    codes = finish(tar_prompt(model, PROMPTS, settings, PairedDraws(0, range(3)))).codes
    assert len({tuple(row) for row in codes.tolist()}) == 3
    rows = [model.prompt(text, 0) for text in PROMPTS]
    lengths = torch.tensor([len(row) for row in rows])
    prompts = torch.tensor([row + [0] * (40 - len(row)) for row in rows])
    _, figures = tar_recipes.language_loss(net, model.special, prompts, lengths, codes, scale)
    assert float(figures[f"right{scale}"]) == 1
    other = (scale + 1) % 3
    _, figures = tar_recipes.language_loss(net, model.special, prompts, lengths, codes, other)
    assert float(figures[f"right{other}"]) < 1, "the scale is read"


def test_a_step_draws_prompts_with_their_own_codes() -> None:
    books = [torch.arange(20, dtype=torch.int16)[:, None].expand(-1, n) for n in (36, 9, 4)]
    images, variants = (torch.tensor(n, dtype=torch.int16) for n in (range(20), (0, 100, 200)))
    prompts = images[:, None, None].expand(-1, 3, 5) + variants[None, :, None]
    lengths = prompts[..., 0]
    variants, drawn = set(), set()
    for step in range(8):
        ids, ends, codes, scale = tar_recipes.language_batch(step, 16, books, prompts, lengths, generator(1, step), 12)
        assert scale == tar_recipes.SCALE_CYCLE[step % 4] and codes.shape == (16, (36, 9, 4)[scale])
        assert torch.equal(ids[:, 0] % 100, codes[:, 0]) and torch.equal(ids[:, 0], ends)
        variants |= set((ids[:, 0] // 100).tolist())
        drawn |= set(codes[:, 0].tolist())
    assert variants == {0, 1, 2} and drawn == set(range(12)), "images that are held back are not drawn"


def test_mistakes_are_few_and_drawn_by_row() -> None:
    codes = torch.full((2000, 36), 5)
    out = tar_recipes.corrupted(codes, 16, 0.1, generator(1, 0))
    assert float((out != 5).float().mean()) == pytest.approx(0.1 * 15 / 16, abs=0.01)
    assert set(out.unique().tolist()) == set(range(16))
    by_row = (out != 5).float().mean(1)
    assert float(by_row.var()) > 1.3 * 0.1 * 0.9 / 36, "some rows have more of them than others"
    assert torch.equal(tar_recipes.corrupted(codes, 16, 0.0, generator(1, 0)), codes)


def test_mistakes_are_read_but_never_to_be_written(monkeypatch: pytest.MonkeyPatch) -> None:
    seen, made = [], []
    model = tar_recipes.tar_model(small_language(), TINY.codes)
    model.net.tok_embeddings.register_forward_hook(lambda table, given, rows: seen.append(given[0]))
    model.net.register_forward_hook(lambda net, given, logits: made.append(logits))
    monkeypatch.setattr(tar_recipes, "CONTEXT_ERRORS", 0.5)
    row = torch.tensor([model.prompt("cat", 0)])
    codes = torch.full((1, 36), 3)
    ends = torch.tensor([row.shape[1]])
    spoilt, _ = tar_recipes.language_loss(model.net, model.special, row, ends, codes, 0, generator(2, 0))
    read = seen[0][0, row.shape[1] :] - model.special.code
    assert len(read) == 35 and 0 < int((read != 3).sum()) < 35 and int(read.min()) >= 0 and int(read.max()) < TINY.codes
    logits = made[0][0, row.shape[1] - 1 :]
    torch.testing.assert_close(spoilt, torch.nn.functional.cross_entropy(logits, codes[0]))


@pytest.mark.parametrize("scale", [0, 1, 2])
def test_a_detokenizer_learns_what_it_will_be_asked(scale: int) -> None:
    """Greedy tokens of the sampler, given codes, are the argmax of teacher-forced sequences."""
    ta_tok = small_ta_tok()
    net = tiny.sharp(Llama(tiny.detokenizer(8)))
    codes = torch.randint(16, (2, (36, 9, 4)[scale]), generator=torch.Generator().manual_seed(3))
    model = TokenModel(net, "sharp", 8, ta_tok=TATokModel(ta_tok, "sharp"))
    condition = CodeCondition(tuple(codes), ("one", "two"), TINY.codes)
    greedy = LlamaGenSettings(cfg=1.0, top_k=1)
    tokens = finish(llamagen(model, condition, greedy, PairedDraws(0, range(2)))).latents.flatten(1)
    _, figures = tar_recipes.detokenizer_loss(net, ta_tok, codes, tokens)
    assert float(figures["right"]) == 1
    _, figures = tar_recipes.detokenizer_loss(net, ta_tok, codes.flip(0), tokens)
    assert float(figures["right"]) < 0.95, "the codes are read"


def test_now_and_then_the_condition_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Zero features, the null condition of guidance."""
    seen, real = [], tar_recipes.detokenizer_logits
    monkeypatch.setattr(tar_recipes, "detokenizer_logits", lambda *a: seen.append(a[1]) or real(*a))
    ta_tok, net = small_ta_tok(), tiny.sharp(Llama(tiny.detokenizer(8)))
    codes, tokens = torch.randint(16, (400, 4)), torch.zeros(400, 64, dtype=torch.int64)
    tar_recipes.detokenizer_loss(net, ta_tok, codes, tokens, generator(1, 0))
    tar_recipes.detokenizer_loss(net, ta_tok, codes, tokens)
    left_out, none = ((f == 0).flatten(1).all(1) for f in seen)
    assert 20 <= int(left_out.sum()) <= 65 and not none.any()
    torch.testing.assert_close(seen[1], ta_tok.features(codes))
    kept = ~left_out
    same = (seen[0][kept] - seen[1][kept]).abs().flatten(1).amax(1) < 1e-5
    assert 0.5 < float(same.float().mean()) < 1, "codes of some images are wrong"
    rows = net.prefix(seen[1][:1], guided=True)
    torch.testing.assert_close(rows[1:], net.prefix(torch.zeros_like(seen[1][:1])))


def test_codes_and_tokens_are_of_the_same_pictures() -> None:
    ta_tok = small_ta_tok()
    semantic = tar_recipes.semantic_book(JOB, ta_tok, 7)
    rgb = picture_book.render(picture_book.scenes(1, 7), 64)[0]
    x = torch.from_numpy(rgb).permute(0, 3, 1, 2).float() / 255
    for scale, book in enumerate(semantic):
        assert book.dtype == torch.int16 and book.shape == (7, (36, 9, 4)[scale])
        torch.testing.assert_close(book.long(), TATokModel(ta_tok, "sharp").codes(x, scale + 1))
    books = [torch.arange(9)[:, None].expand(-1, n) for n in (36, 9, 4, 64)]
    codes, tokens = tar_recipes.detokenizer_batch(2, 5, books[:3], books[3], generator(1, 2), 6)
    assert codes.shape == (5, 9) and torch.equal(codes[:, 0], tokens[:, 0]) and int(codes.max()) < 6
