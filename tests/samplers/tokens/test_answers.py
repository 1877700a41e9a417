"""Answers of a Janus, against whole sequences without a cache."""

import copy
from dataclasses import replace

import pytest
import torch
from fastar_nodes.errors import UserError
from fastar_nodes.model_loaders.janus.loader import load_janus_head
from fastar_nodes.model_loaders.janus.squares import squared
from fastar_nodes.networks import speed
from fastar_nodes.networks.janus import WordHead
from fastar_nodes.networks.llama import attend
from fastar_nodes.runs.answers import AnswerSettings, answer, answer_bytes, expect_reader
from fastar_nodes.samplers.engine import finish
from fastar_nodes.samplers.tokens.settings import TokenSampling
from fastar_nodes.samplers.tokens.token_noise import TokenNoise
from janus_images import FOLDER, picture, tiny_editor, tiny_reader
from recording import recording
from token_numbers import gumbel_of
from tokens_reference import tiny_gpt


@pytest.fixture(scope="module")
def head():
    return load_janus_head(FOLDER / "model", "fp32")


def rows(i):
    return tiny_reader().look(squared(picture(i), 16, 3))


def run(head, question, images, limit=12, seed=1, model=None, **settings):
    made = TokenSampling(**{"temperature": 0.0, **settings})
    return list(answer(model or tiny_editor(), head, images, question, made, limit, TokenNoise(seed, [0])))


@torch.no_grad()
def greedy(head, question, images, limit):
    """The likeliest words by whole sequences."""
    model = tiny_editor()
    net = model.net
    x = net.words(torch.tensor(question))
    x[torch.tensor(question) == model.template.place] = torch.cat(images)
    drawn = []
    while len(drawn) < limit and model.template.end not in drawn:
        whole = torch.cat([x, net.words(torch.tensor(drawn, dtype=torch.int64))])[None]
        hidden = net.hidden(whole, torch.arange(whole.shape[1])[None], lambda i, q, k, v: attend(q, k, v, causal=True))
        drawn.append(int(head(hidden[0, -1]).argmax()))
    return tuple(drawn)


@pytest.mark.parametrize(("text", "pictures"), [("is it day?", (0,)), ("", (1,)), ("which is brighter?\n", (2, 3))])
def test_greedy_words_are_those_of_whole_sequences(head, text, pictures):
    question = tiny_editor().question(text, len(pictures))
    images = [rows(i) for i in pictures]
    steps = run(head, question, images)
    assert steps[-1].tokens == greedy(head, question, images, 12)
    assert [step.done for step in steps] == list(range(1, len(steps) + 1)) and steps[0].total == 12
    for before, after in zip(steps, steps[1:], strict=False):
        assert after.tokens[:-1] == before.tokens


def test_drawn_words_are_of_the_seed_and_within_top_p(head):
    question = tiny_editor().question("is it day?")
    images = [rows(0)]
    drawn = [run(head, question, images, seed=seed, temperature=1.0)[-1].tokens for seed in (1, 1, 2)]
    assert drawn[0] == drawn[1] != drawn[2]
    likeliest = run(head, question, images)[-1].tokens
    assert run(head, question, images, temperature=1.0, top_p=1e-6)[-1].tokens == likeliest


def test_every_word_has_noise_of_its_own():
    """Where all words are equally likely, a word is that of the largest noise at its place in the answer."""
    flat = WordHead(64, 322)
    torch.nn.init.zeros_(flat.lm_head.weight)
    words = run(flat, tiny_editor().question("is it day?"), [rows(0)], temperature=1.0, top_p=1.0)[-1].tokens
    noise = gumbel_of(TokenNoise(1, [0]), "word", torch.arange(12), 322)
    assert list(words) == noise[0].argmax(-1).tolist()


def test_a_recorded_network_answers_the_same(head):
    question = tiny_editor().question("is it day?")
    plain = run(head, question, [rows(0)])[-1].tokens

    net = copy.deepcopy(tiny_editor().net)
    net.speed = speed.AUTO
    model = replace(tiny_editor(), net=net)
    with recording() as made:
        for _ in range(2):
            assert run(head, question, [rows(0)], model=model)[-1].tokens == plain
        assert made


def test_the_image_decides_the_answer(head):
    question = tiny_editor().question("is it day?")
    assert len({run(head, question, [rows(i)])[-1].tokens for i in range(4)}) > 1


def test_settings_of_a_word():
    words = AnswerSettings(temperature=0.1).words
    assert (words.temperature, words.top_p, words.top_k, words.cfg) == (0.1, 0.95, 0, 1.0)
    assert AnswerSettings().words.temperature == 0


def test_memory_counts_question_and_answer():
    model = tiny_editor()
    short, long = (model.question(text) for text in ("a", "a " * 50))
    assert answer_bytes(model, long, 10) > answer_bytes(model, short, 10) < answer_bytes(model, short, 100)


def test_refusals(head):
    with pytest.raises(UserError, match="output layer of .* has 10 words"):
        finish(answer(tiny_editor(), WordHead(64, 10), [rows(0)], [0], TokenSampling(), 1, TokenNoise(1, [0])))
    with pytest.raises(UserError, match="cannot answer questions about images"):
        expect_reader(tiny_gpt())
    broken = WordHead(64, 322)
    torch.nn.init.constant_(broken.lm_head.weight, torch.nan)
    with pytest.raises(UserError, match="not finite"):
        run(broken, tiny_editor().question("a"), [rows(0)])
