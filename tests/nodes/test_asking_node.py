"""Ask about Image, on the fake ComfyUI."""

import gc
import weakref
from dataclasses import replace

import fake_comfy
import janus_images
import pytest
import torch
from fake_comfy import Progress
from fastar_nodes.errors import UserError
from fastar_nodes.model_loaders.catalogue import hub
from fastar_nodes.nodes import host
from fastar_nodes.nodes.asking import AskAboutImage
from fastar_nodes.nodes.loaders import LoadJanus
from safetensors.torch import load_file

QUESTION = "What is on the table?"  # the recorded u2, about image 1


@pytest.fixture
def loaded(tmp_path, monkeypatch):
    path = janus_images.one_file(tmp_path / "janus.safetensors", "Janus-Pro-7B")  # which reads, and does not edit
    monkeypatch.setattr(hub, "absent", lambda *_: None)
    monkeypatch.setattr(hub, "resolve", lambda *_: path)
    choice = "janus-pro-1b (download 4.18 GB, not pinned)"
    return LoadJanus.execute(checkpoint=choice, dtype="fp32", allow_download=False, speed="plain").result[0]


def image(*numbers):
    return torch.stack([janus_images.picture(i).float() / 255 for i in numbers])


def ask(model, pictures, question=QUESTION, seed=0, **values):
    return AskAboutImage.execute(model=model, image=pictures, question=question, seed=seed, **values)


def recorded(name):
    tokens = load_file(janus_images.FOLDER / "understand/io.safetensors")[f"{name}.tokens"]
    return janus_images.tiny_editor().detokenize(tokens.tolist()).strip()


def test_the_recorded_answer(loaded):
    (answers,) = ask(loaded, image(1)).result
    assert answers == [recorded("u2")]


def test_what_read_an_image_does_not_keep_the_tokenizer_of_a_loader_that_is_gone(tmp_path, monkeypatch):
    """Else its memory stays taken, and ComfyUI warns of a leak at every later run."""
    model = loaded.__wrapped__(tmp_path, monkeypatch)
    ask(model, image(1))
    tokenizer = weakref.ref(model.vae.tokenizer.net)
    del model
    fake_comfy.state.loaded.clear()
    gc.collect()
    assert tokenizer() is None


def test_the_limit_and_the_end_token(loaded):
    """The recorded answer ends after 8 tokens, whatever the limit above them."""
    assert ask(loaded, image(1), limit=8).result == ask(loaded, image(1), limit=500).result
    (short,) = ask(loaded, image(1), limit=3).result[0]
    assert recorded("u2").startswith(short[:1]) and len(short) < len(recorded("u2"))


def test_every_image_has_its_answer(loaded):
    both = torch.rand(2, 9, 20, 3, generator=torch.Generator().manual_seed(1))
    (answers,) = ask(loaded, both).result
    assert answers[:1] == ask(loaded, both[:1]).result[0] and answers[1:] == ask(loaded, both[1:]).result[0]


def test_the_bar_runs_over_all_images(loaded):
    ask(loaded, image(1, 1))
    shares = [done / total for done, total, _ in Progress.updates]
    assert shares == sorted(shares) and 0.5 in shares and shares[0] < 0.5 < shares[-1]


def test_drawn_words_belong_to_the_seed(loaded):
    first, again, other = (ask(loaded, image(1), seed=seed, temperature=1.5, limit=20).result for seed in (1, 1, 2))
    assert first == again and first != other


def test_words_are_shown_as_they_come_and_a_cancel_ends_them(loaded, monkeypatch):
    shown = []
    monkeypatch.setattr(host.text, "show", lambda node, line: shown.append(line))
    ask(loaded, image(1))
    assert len(shown) == 8 and shown[-1] == recorded("u2") and shown[0] != shown[-1]

    class Cancelled(BaseException):
        pass

    def stop():
        if len(shown) >= 11:
            raise Cancelled

    monkeypatch.setattr(host.progress, "stop_if_cancelled", stop)
    with pytest.raises(Cancelled):
        ask(loaded, image(1))
    assert len(shown) == 11


def test_refusals(loaded):
    def refused(message, model=loaded, pictures=None, **values):
        with pytest.raises(UserError, match=message):
            ask(model, image(1) if pictures is None else pictures, **values)

    refused("^limit: ", limit=0)
    refused("^temperature: ", temperature=3.0)
    refused("^seed: ", seed=-1)
    refused("^image: ", pictures=torch.zeros(1, 4, 4))
    refused("^question: |^text: ", question=3)
    refused("^text: the prompt has", question="word " * 3000)
    refused("^model: ", model=None)
    blind = replace(loaded, model=replace(loaded.model, vision_file=None))
    refused("lacks the part that reads images", model=blind)
