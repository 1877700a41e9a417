"""The interface to ComfyUI: running a sampler, previews, decoders, memory."""

from types import SimpleNamespace

import fake_comfy
import pytest
import torch
from fake_comfy import Interrupted, Progress
from fastar_nodes.errors import UserError
from fastar_nodes.nodes import host, loaders, preview
from fastar_nodes.nodes.vae import KL, mark
from tiny import a_vae, a_vq


def steps(total: int, closed: list):
    """A sampler that decides one of four tokens a step."""
    decided = torch.zeros(1, 2, 2, dtype=torch.bool)
    try:
        for i in range(total):
            decided.view(-1)[: i + 1] = True
            step = SimpleNamespace(done=i + 1, total=total, latents=torch.ones(1, 2, 2, 2), decided=decided.clone())
            yield step
    finally:
        closed.append(True)
    return "result"


def test_drive_reports_every_step_and_returns_the_result():
    closed = []
    assert preview.drive(steps(4, closed), a_vae()) == "result"
    assert [(a, b) for a, b, _ in Progress.updates] == [(1, 4), (2, 4), (3, 4), (4, 4)]
    assert Progress.updates[-1][2][0] == "JPEG" and Progress.updates[-1][2][1].size == (256, 256)
    assert closed == [True]


def test_cancel_stops_before_the_next_step_and_closes_the_sampler():
    closed = []
    fake_comfy.state.interrupt_at = 2
    with pytest.raises(Interrupted):
        preview.drive(steps(100, closed), a_vae())
    assert len(Progress.updates) == 2 and closed == [True]


def test_no_preview_when_memory_is_insufficient(monkeypatch):
    vae = a_vae()
    monkeypatch.setattr(vae, "decode_now", lambda z: (_ for _ in ()).throw(RuntimeError("CUDA out of memory")))
    assert preview.drive(steps(2, []), vae) == "result"
    assert all(picture is None for _, _, picture in Progress.updates)


EDITOR = {"client_id": "editor", "extra_pnginfo": {"workflow": {"nodes": []}}}
# A prompt's extra data, the server's --preview-method, and whether previews and texts on nodes are sent.
CLIENTS = {
    "a program": ({"client_id": "program"}, "none", False, False),
    "a program without a connection": ({}, "none", False, False),
    "a program that saves a graph": (EDITOR | {"client_id": "program"}, "none", False, False),
    "a program that reads metadata": ({"client_id": "editor"}, "none", False, False),
    "a program on a server with previews": ({"client_id": "program"}, "auto", True, False),
    "a program that asks for previews": ({"client_id": "program", "preview_method": "latent2rgb"}, "none", True, False),
    "a program that asks for none": ({"client_id": "program", "preview_method": "none"}, "auto", False, False),
    "the editor": (EDITOR, "none", True, True),
    "the editor, default": (EDITOR | {"preview_method": "default"}, "none", True, True),
    "the editor, auto": (EDITOR | {"preview_method": "auto"}, "none", True, True),
    "the editor, none": (EDITOR | {"preview_method": "none"}, "auto", False, True),
    "damaged": ({"extra_pnginfo": "x", "client_id": 3, "preview_method": 7}, "none", True, False),
}


@pytest.mark.parametrize("client", CLIENTS)
def test_previews_and_texts_are_for_the_editor_or_for_who_asks(client, monkeypatch, caplog):
    """A widely used client takes every binary message for an image of the result. Another run's data do not count."""
    extra, by_server, shown, told = CLIENTS[client]
    flags = {"editor": {"feature_flags": {"supports_preview_metadata": True}}, "program": {"feature_flags": {}}}
    monkeypatch.setattr(fake_comfy.state, "context", SimpleNamespace(prompt_id="a"))
    fake_comfy.state.sockets.update(flags)
    monkeypatch.setattr(host.queue.args.preview_method, "value", by_server)
    other = (1, "b", {}, EDITOR | {"preview_method": "none" if shown else "auto"})
    monkeypatch.setattr(fake_comfy.state, "running", [other, (0, "a", {}, extra, [], {})])
    preview.drive(steps(4, []), a_vae())
    assert (Progress.updates[-1][2] is not None) == shown
    node = SimpleNamespace(hidden=SimpleNamespace(unique_id="7"))
    with caplog.at_level("INFO"):
        host.text.show(node, "cell 1 of 2")
        stays = host.text.output(["", "32 passes."], ["No gain here.", ""], "32 AR steps.", {"4": "Words."})
    assert fake_comfy.state.said == ([("7", "cell 1 of 2")] if told else [])
    assert stays == {
        "fastar_text": ["No gain here.\n32 passes.\n32 AR steps."],
        "fastar_text_parts": [{"warnings": ["No gain here."], "figures": ["32 passes."]}],
        "fastar_prompt_texts": [["4", "Words."]],
    }
    logged = ["FastAR: cell 1 of 2", "FastAR: Words. No gain here. 32 passes. 32 AR steps."]
    assert caplog.messages == ([] if told else logged), "it is not lost"


STRANGE = "<img src=http://a.example/x> ![y](http://b.example) `c` www.d.example"


def test_a_text_of_a_run_that_lasts_shows_what_stands_there():
    """The editor shows it as HTML, Nodes 2.0 as Markdown: both decode character references."""
    node = SimpleNamespace(hidden=SimpleNamespace(unique_id="7"))
    host.text.show(node, f"{STRANGE}\n{'x' * 10_000_000}")
    ((_, text),) = fake_comfy.state.said
    assert text.startswith(
        "&#60;img src=http&#58;//a.example/x&#62; !&#91;y&#93;(http&#58;//b.example) &#96;c&#96; www&#46;d.example xx"
    )
    assert text.endswith("x...") and len(text) < 500


def test_a_text_that_stays_is_short_and_as_it_is():
    """Its widget shows characters, neither HTML nor Markdown."""
    first, second, third = host.text.output([f"{STRANGE}\na\tb\x1b", "x" * 10_000_000])["fastar_text"][0].split("\n")
    assert first == STRANGE and second == "a b" and third == "x" * 397 + "..."
    (text,) = host.text.output([f"line {i}" for i in range(1000)])["fastar_text"]
    assert text.split("\n") == [f"line {i}" for i in range(8)]
    nothing = {"warnings": [], "figures": []}
    assert host.text.output([]) == {
        "fastar_text": [""],
        "fastar_text_parts": [nothing],
        "fastar_prompt_texts": [],
    }, "the same names, for list runs"


def test_the_t5_tokenizer_of_comfyui_is_found_beside_its_folders(tmp_path, monkeypatch):
    monkeypatch.setattr(host.folders.folder_paths, "__file__", str(tmp_path / "folder_paths.py"), raising=False)
    assert host.folders.t5_tokenizer() is None
    folder = tmp_path / "comfy" / "text_encoders" / "t5_tokenizer"
    folder.mkdir(parents=True)
    (folder / "tokenizer.json").touch()
    assert host.folders.t5_tokenizer() == folder


def test_vae_decodes_and_encodes():
    vae = a_vae(8)
    z = torch.rand(3, 2, 2, 2) * 2 - 1
    pictures = vae.decode(z)
    assert pictures.shape == (3, 8, 8, 3) and 0 <= pictures.min() and pictures.max() <= 1
    assert torch.allclose(vae.encode(pictures), z, atol=1e-6)
    assert torch.equal(vae.decode(z[:, :, None]), pictures)


def test_latents_of_another_kind_or_shape_are_refused():
    vq = a_vq()
    for samples in (torch.zeros(1, 3, 2, 2), mark(torch.zeros(1, 4, 2, 2), KL), "text", torch.zeros(4)):
        with pytest.raises(UserError, match="^samples: "):
            vq.decode(samples)
    with pytest.raises(UserError, match="^pixels: "):
        vq.encode(torch.zeros(0, 8, 8, 3))


@pytest.mark.parametrize("height, width", [(16, 16), (11, 9), (3, 30), (1, 1), (100, 64)])
def test_pictures_of_any_size_are_encoded_at_the_models_size(height, width):
    """The whole image, not a part of it."""
    for channels in (1, 3, 4):
        picture = torch.zeros(1, height, width, channels)
        picture[:, : height // 2] = 1
        z = a_vae(16).encode(picture)
        assert z.shape == (1, 2, 4, 4)
        if height > 1:
            assert (z[:, :, 0] > 0.5).all() and (z[:, :, 3] < -0.5).all()


def test_networks_that_comfyui_left_behind_are_moved():
    net = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2))
    host.memory.load_weights([SimpleNamespace(model=net, load_device=torch.device("meta"))], 1.0)
    assert all(t.is_meta for t in (*net.parameters(), *net.buffers()))
    assert fake_comfy.state.loaded[0][1] == {"memory_required": 1.0, "force_full_load": True}


def test_a_kl_decoder_asks_for_less_than_core_estimates():
    """The demo's even of an image of the size that it encodes, although it draws a larger one."""
    vae = loaders.LoadMAR.execute("demo", "auto", "fp32", False, "plain").result[1]
    for shape in ((1, 8, 8, 8), (1, 8, 256, 256)):
        core = 17 * vae.width * shape[2] * shape[3] * vae.downscale_ratio**2 * 4
        assert core / 4 < vae.memory_used_decode(shape, torch.float32) < core


def test_previews_are_seldom_when_they_are_expensive(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(preview.time, "perf_counter", lambda: now[0])

    def slow(latents):
        now[0] += 2.0
        return torch.zeros(1, 4, 4, 3)

    canvas = preview.Canvas(slow)
    now[0] = 0.6
    assert canvas.due()
    canvas.draw(torch.zeros(1, 1, 1, 1), torch.ones(1, 1, 1, dtype=torch.bool))
    now[0] += 19
    assert not canvas.due()
    now[0] += 2
    assert canvas.due()


def test_the_folder_of_the_models_exists_after_the_first_start(tmp_path, monkeypatch):
    monkeypatch.setattr(host.folders.folder_paths, "models_dir", str(tmp_path))
    monkeypatch.setitem(host.folders.folder_paths.folder_names_and_paths, "fastar", ([], set()))
    for _ in range(2):
        host.folders.register_folders()
        assert (tmp_path / "fastar").is_dir()
