"""Editing with a Janus: three branches of guidance against whole sequences without a cache, batches, windows, masks."""

from dataclasses import replace

import pytest
import torch
from fastar_nodes.errors import UserError
from fastar_nodes.model_loaders.catalogue.official import official_janus
from fastar_nodes.networks.janus import Janus
from fastar_nodes.networks.llama import cache_bytes
from fastar_nodes.runs.memory import tokens as memory
from fastar_nodes.runs.registry import SAMPLERS
from fastar_nodes.samplers.conditioning import ImagePromptCondition
from fastar_nodes.samplers.editing import Edit
from fastar_nodes.samplers.engine import finish
from fastar_nodes.samplers.tokens.token_noise import TokenNoise
from janus_images import PROMPTS, edits_of, picture, tiny_editor
from tokens_reference import tiny_gpt


def run(condition, images=(0, 1, 2), sampler="llamagen", edit=None, **settings):
    """The result of a sampler; ``images`` are the numbers of their noise."""
    entry = SAMPLERS[sampler]
    more = {} if edit is None else {"edit": edit}
    return finish(entry.run(tiny_editor(), condition, entry.settings(**settings), TokenNoise(5, images), **more))


def codes(*args, **more):
    return run(*args, **more).latents


def branch_rows(text, read):
    """Rows [n, C] in front of the image of the whole condition, the partial and the null one, one id after another."""
    model = tiny_editor()
    net = model.net
    special = model.template
    count = model.tokens
    head = [special.begin, special.user, *model.tokenize(": ")]
    tail = [*model.tokenize(text + "\n\n"), special.assistant, *model.tokenize(":"), special.image]

    def words(ids):
        return net.words(torch.tensor(ids))

    seen = torch.cat([words([special.image]), read.rows, words([special.image_end])])
    padding = words([special.image, *[net.config.pad] * count, special.image_end])
    code_rows = torch.cat([words([special.image]), net.tok_embeddings(read.codes), words([special.image_end])])

    whole = torch.cat([words(head), seen, code_rows, words(tail)])
    part = torch.cat([words(head), seen, padding, words(tail)])
    null = words([special.begin, *[net.config.pad] * (len(whole) - 2), special.image])
    return whole, part, null


@torch.no_grad()
def greedy(text, read, cfg, freedom):
    """The likeliest tokens int64 [N] by whole sequences, without a cache."""
    model = tiny_editor()
    net = model.net
    prefixes = branch_rows(text, read)
    drawn = []
    for _ in range(model.tokens):
        logits = []
        for prefix in prefixes:
            x = torch.cat([prefix, net.tok_embeddings(torch.tensor(drawn, dtype=torch.int64))])[None]
            n = len(prefix)
            places = torch.arange(-n, len(drawn))
            logits.append(net(x, places, net.positions(model.grid, n))[0, -1])
        whole, part, null = logits
        drawn.append(int((null + cfg * ((whole + freedom * part) / (1 + freedom) - null)).argmax()))
    return torch.tensor(drawn)


@pytest.mark.parametrize(("cfg", "freedom"), [(5.0, 5.0), (3.0, 1.0), (2.0, 0.0), (1.0, 5.0)])
@pytest.mark.fast_cases(2)
def test_greedy_tokens_are_those_of_whole_sequences(cfg, freedom):
    condition = edits_of((0, 1), freedom)
    drawn = codes(condition, (0, 1), cfg=cfg, temperature=0).flatten(1)
    for i in range(2):
        assert torch.equal(drawn[i], greedy(condition.texts[i], condition.encoded_images[i], cfg, freedom))


@pytest.mark.parametrize("sampler", ["llamagen", "zipar"])
@pytest.mark.parametrize("freedom", [5.0, 0.0])
@pytest.mark.fast_cases(2)
def test_alone_in_a_batch_and_in_windows(sampler, freedom):
    window = {"window": 2} if sampler == "zipar" else {}
    condition = edits_of(freedom=freedom)
    serial = codes(condition, sampler=sampler, **window)
    assert torch.equal(codes(condition, sampler=sampler, parallel=3, **window), serial)
    assert len(serial.flatten(1).unique(dim=0)) == 3
    for i in range(3):
        assert torch.equal(codes(condition.for_images([i]), (i,), sampler=sampler, **window)[0], serial[i])
        assert torch.equal(codes(condition.for_images([i]), (i,), sampler=sampler, parallel=5, **window)[0], serial[i])


def test_windows_of_16_bits_draw_one_image():
    """In calls of one shape, three branches too: every window up to the side of the image."""
    entry = SAMPLERS["llamagen"]
    model = tiny_editor("bf16")

    def drawn(parallel):
        settings = entry.settings(parallel=parallel)
        return finish(entry.run(model, edits_of(), settings, TokenNoise(5, (0, 1, 2)))).latents

    one = drawn(1)
    assert torch.equal(drawn(4), one) and torch.equal(drawn(2), one)


def test_a_window_of_a_row_is_raster_order():
    assert torch.equal(codes(edits_of(), sampler="zipar", window=4), codes(edits_of()))


def test_masks_keep_given_tokens():
    condition = edits_of()
    mask = torch.zeros(1, 8, 8)
    mask[:, 4:] = 1  # the lower half is drawn again
    given = (codes(condition) + 1) % 128
    drawn = codes(condition, edit=Edit(given, mask))
    assert torch.equal(drawn[:, :2], given[:, :2])
    assert not torch.equal(drawn[:, 2:], codes(condition)[:, 2:])
    assert torch.equal(codes(condition, edit=Edit(given, mask), parallel=4), drawn)


def test_image_prompt_and_freedom_decide_the_tokens():
    one = edits_of((0,))
    plain = codes(one, (0,), temperature=0)
    others = (
        edits_of((0,), freedom=0.0),
        replace(edits_of((1,)), texts=one.texts),
        replace(one, texts=("make it day",)),
    )
    for other in others:
        assert not torch.equal(codes(other, (0,), temperature=0), plain)
        assert other.digests() != one.digests()


def test_prompts_are_read_once_and_branches_without_effect_never():
    """Of three images two have the same pair; a branch without weight, or without guidance, is not evaluated."""
    model = tiny_editor()
    longest = len(model.image_prompt(PROMPTS[1]))
    for freedom, cfg, branches in ((5.0, 5.0, 3), (0.0, 5.0, 2), (5.0, 1.0, 2), (0.0, 1.0, 1)):
        counts = run(edits_of(freedom=freedom), cfg=cfg).report.counts
        fed = model.tokens - 1
        assert counts["transformer_tokens"] == branches * (2 * longest + 3 * fed)


def test_blanks_behind_a_prompt_are_removed():
    model = tiny_editor()
    assert model.image_prompt("cat \n") == model.image_prompt("cat")
    assert model.image_prompt(" cat") != model.image_prompt("cat"), "as the authors'"


def test_memory_counts_three_branches():
    settings = SAMPLERS["llamagen"].settings(cfg=5.0)
    three, two = (memory.estimate(tiny_editor(), edits_of((0,), freedom), settings) for freedom in (5.0, 0.0))
    rows = len(tiny_editor().image_prompt(PROMPTS[0])) + tiny_editor().tokens - 1
    assert three - two >= cache_bytes(tiny_editor().net, rows)
    assert three >= run(edits_of((0,)), (0,), cfg=5.0).report.counts["cache_bytes"]


def test_memory_counts_a_shared_prompt_once():
    settings = SAMPLERS["llamagen"].settings(cfg=5.0)
    one = replace(edits_of((0,)), texts=(PROMPTS[0],) * 3, images=edits_of((0,)).images * 3)
    other = replace(one, texts=("a b c", "make it", PROMPTS[0]))
    assert memory.estimate(tiny_editor(), one, settings) < memory.estimate(tiny_editor(), other, settings)
    rows = len(tiny_editor().image_prompt(PROMPTS[0])) + tiny_editor().tokens - 1
    assert memory.estimate(tiny_editor(), one, settings) > cache_bytes(tiny_editor().net, 3 * 3 * rows)


def test_the_cache_of_a_7b_takes_2_and_a_half_gib_an_image():
    """Three branches of about 1,750 rows of 480 KiB in 16 bits; a second image of the pair reads no prompt."""
    with torch.device("meta"):
        net = Janus(official_janus("Janus-Pro-7B")).to(torch.bfloat16)
    model = replace(tiny_editor(), net=net, grid=24)
    settings = SAMPLERS["llamagen"].settings(cfg=5.0)
    rows = len(model.image_prompt(PROMPTS[0])) + model.tokens
    cache = 3 * rows * 480 * 2**10
    assert 2.3 < cache / 2**30 < 2.5

    def need(images):
        condition = ImagePromptCondition((PROMPTS[0],) * images, (picture(0),) * images)
        return memory.estimate(model, condition, settings)

    prefill = 3 * rows * (8 * 4096 + 3 * 11008) * 2
    assert cache < need(1) < cache + prefill
    assert 0.95 * cache < need(2) - need(1) < 1.05 * cache


def test_a_model_that_cannot_edit_says_why():
    entry = SAMPLERS["llamagen"]

    def refused(model, condition):
        with pytest.raises(UserError) as found:
            next(entry.run(model, condition, entry.settings(), TokenNoise(1, (0,))))
        return str(found.value)

    condition = edits_of((0,))
    editor = tiny_editor()
    assert "Janus-Pro-7B was not trained to edit" in refused(replace(editor, name="Janus-Pro-7B"), condition)
    assert "lacks the part that reads images" in refused(replace(editor, vision_file=None), condition)
    assert "needs 25 vectors of width" in refused(replace(editor, grid=5), condition)
    assert "reads class labels" in refused(tiny_gpt(), condition)
    empty = ImagePromptCondition((), (), encoded_images=())
    assert "holds no prompt" in refused(editor, empty)
    bare = replace(editor, template=replace(editor.template, place=None))
    assert "has no tokens for an image" in refused(bare, condition)


def test_names_tell_what_a_model_was_trained_for():
    named = {"Janus-4o-7B": True, "my-janus-4o": True, "Janus-Pro-7B": False, "Janus-1.3B": False, "janus_pro": False}
    for name, edits in (named | {"model": None, "Janus-14of": None}).items():
        assert replace(tiny_editor(), name=name).edits is edits


def test_what_is_not_known_to_edit_is_remarked():
    report = run(edits_of((0,)), (0,)).report
    assert "is not known to have been trained to edit" in report.note


def test_equal_images_are_read_once():
    first, second, third = edits_of().encoded_images
    assert first is third and first is not second
