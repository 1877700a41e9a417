"""The decoder on core's VAE socket, with numbers by hand: sizes of tiles, memory, batches, ranges and devices."""

from pathlib import Path
from types import SimpleNamespace

import fake_comfy
import fastar_nodes
import pytest
import torch
from fastar_nodes import load_binary, load_kl, load_vq
from fastar_nodes.errors import UserError
from fastar_nodes.networks.autoencoder import KLAutoencoder, KLConfig
from fastar_nodes.networks.enlarging import EnlargingConfig
from fastar_nodes.nodes import host
from fastar_nodes.nodes.host.loaded import Loaded
from fastar_nodes.nodes.vae import FastARVAE
from qwen_reference import tiny_tar
from safetensors.torch import save_file
from tiny import TinyVAE, a_block, a_mar, a_nextstep, a_vae, a_vq
from torch_states import STATES, state_of_torch

DECODERS = {"kl": load_kl, "vq": load_vq, "binary": load_binary}


@pytest.mark.parametrize("kind", DECODERS)
def test_a_decoder_that_core_saved_loads_as_it_was(kind, tmp_path):
    """Save VAE writes the weights and metadata of its own; the groups of the demo's decoders are 8, not 32."""
    demo = DECODERS[kind](Path(fastar_nodes.__file__).parent / "demo" / "checkpoints" / f"{kind}.safetensors")
    config = demo.net.config
    vae = FastARVAE(demo.net, demo.name, config.stride, config.z_channels, 8, [(64, 64)], kind)
    save_file(vae.get_sd(), tmp_path / "vae_00001_.safetensors", {"prompt": "{}", "workflow": "{}"})

    again = DECODERS[kind](tmp_path / "vae_00001_.safetensors")
    assert again.net.config == config and config.groups == 8
    weights = again.net.state_dict()
    assert weights.keys() == demo.net.state_dict().keys()
    assert all(torch.equal(weights[name], weight) for name, weight in demo.net.state_dict().items())


def test_the_usual_groups_are_not_stated(tmp_path):
    """A file of an official decoder has the names of the official file."""
    net = KLAutoencoder(KLConfig(ch=32, ch_mult=(1,), blocks=1, z_channels=4))
    vae = FastARVAE(net, "official", 1, 4, 32, [(64, 64)], "kl")
    assert vae.get_sd().keys() == net.state_dict().keys()


@pytest.mark.parametrize("stated", [torch.tensor(8.5), torch.tensor(0), torch.tensor([8, 8]), torch.tensor(True)])
def test_groups_that_are_no_number_of_groups_are_refused(stated, tmp_path):
    net = KLAutoencoder(KLConfig(ch=8, ch_mult=(1,), blocks=1, z_channels=4, groups=8))
    save_file({**net.state_dict(), "fastar_groups": stated}, tmp_path / "vae.safetensors")
    with pytest.raises(UserError, match="groups"):
        load_kl(tmp_path / "vae.safetensors")


@pytest.fixture
def tiles(monkeypatch):
    """What is asked of core's tiles; the result is empty."""
    asked = []

    def in_tiles(x, work, **about):
        asked.append({"size": tuple(x.shape[2:]), **about})
        return torch.zeros(1, about["channels"], 1, 1)

    monkeypatch.setattr(host.images, "in_tiles", in_tiles)
    return asked


def test_tiles_of_latents_are_height_by_width(tiles):
    a_vae().decode_tiled(torch.zeros(1, 2, 6, 10), tile_x=5, tile_y=3, overlap=2)
    (asked,) = tiles
    device = torch.device("cpu")
    assert asked == {"size": (6, 10), "tile": (3, 5), "overlap": 2, "scale": 4, "channels": 3, "device": device}
    # 17 bytes of fp32 for 8 channels, 3 x 5 latent positions of 4 x 4 pixels.
    ((_, about),) = fake_comfy.state.loaded
    assert about["memory_required"] == 17 * 8 * (3 * 5) * 16 * 4


def test_tiles_of_pixels_are_whole_latent_positions(tiles):
    vae = a_vae(side=32)
    vae.encode_tiled(torch.zeros(1, 20, 12, 3), tile_x=18, tile_y=15, overlap=7)
    (asked,) = tiles
    device = torch.device("cpu")
    # The image is scaled to 32 x 32; tiles are 12 x 16 pixels; half of 12 is 6, of which 4 are a whole position.
    assert asked == {"size": (32, 32), "tile": (12, 16), "overlap": 4, "scale": 0.25, "channels": 2, "device": device}
    ((_, about),) = fake_comfy.state.loaded
    assert about["memory_required"] == 14 * 8 * (12 * 16) * 4
    vae.encode_tiled(torch.zeros(1, 20, 12, 3), tile_x=1, tile_y=1)
    assert tiles[1]["tile"] == (4, 4), "at least one position"


def test_without_memory_for_one_image_tiles_have_256_pixels(tiles, monkeypatch):
    def full(*_):
        raise RuntimeError("out of memory")

    vae = a_vae(side=32)
    monkeypatch.setattr(vae, "_decode", full)
    monkeypatch.setattr(vae, "_encode", full)
    vae.decode(torch.zeros(1, 2, 4, 4))
    vae.encode(torch.zeros(1, 8, 8, 3))
    assert [(asked["tile"], asked["overlap"]) for asked in tiles] == [((64, 64), 16), ((256, 256), 64)]


TILES = "tiles change the colours and the contrast here, because tiny normalises over the whole image"


@pytest.mark.parametrize(
    ("work", "said"),
    [
        (lambda vae: vae.decode_tiled(torch.zeros(1, 2, 8, 9), 8, 8), "samples: {}; use VAE Decode instead, and if"),
        (lambda vae: vae.decode_tiled(torch.zeros(1, 2, 9, 8), 8, 8), "samples: {}; use VAE Decode instead, and if"),
        (lambda vae: vae.encode_tiled(torch.zeros(1, 32, 32, 3), 31, 40), "pixels: {}; use VAE Encode instead, and if"),
        (lambda vae: vae.decode_tiled(torch.zeros(1, 2, 8, 8), 8, 8), ""),
        (lambda vae: vae.encode_tiled(torch.zeros(1, 32, 32, 3), 32, 32), ""),
    ],
)
def test_tiles_that_change_the_image_are_remarked(work, said, tiles, monkeypatch, caplog):
    """In the log, and on core's node that runs; one tile that holds the image changes nothing."""
    monkeypatch.setattr(fake_comfy.state, "context", SimpleNamespace(prompt_id="run", node_id="4"))
    work(a_vae(side=32))
    text = said.format(TILES)
    messages = [record.message for record in caplog.records]
    sent = [(event, about["node"]) for event, about, _ in fake_comfy.state.sent]
    if not said:
        assert not messages and not sent
        return

    assert len(messages) == 1 and messages[0].startswith(f"FastAR: {text}")
    assert sent == [(host.text.REMARK, "4")] and fake_comfy.state.sent[0][1]["text"] == messages[0][8:]


def test_a_client_that_is_no_editor_gets_no_message(tiles, monkeypatch, caplog):
    monkeypatch.setattr(host.queue, "from_editor", lambda: False)
    monkeypatch.setattr(fake_comfy.state, "context", SimpleNamespace(prompt_id="run", node_id="4"))
    a_vae().decode_tiled(torch.zeros(1, 2, 8, 9), 8, 8)
    assert not fake_comfy.state.sent and len(caplog.records) == 1


def test_memory_is_of_one_image():
    vae = a_vae()
    assert vae.memory_used_decode((9, 2, 3, 5), torch.float32) == 17 * 8 * 3 * 5 * 16 * 4
    assert vae.memory_used_decode((9, 2, 3, 5), torch.float16) == 17 * 8 * 3 * 5 * 16 * 2
    assert vae.memory_used_encode((9, 3, 8, 16), torch.float32) == 14 * 8 * 8 * 16 * 4


def test_a_batch_is_decoded_as_far_as_memory_reaches(monkeypatch):
    vae, sizes = a_vae(), []
    one = vae._decode
    monkeypatch.setattr(vae, "_decode", lambda x: sizes.append(len(x)) or one(x))
    monkeypatch.setattr(host.devices.mm, "get_free_memory", lambda device: 2.5 * 17 * 8 * 2 * 2 * 16 * 4)
    assert len(vae.decode(torch.zeros(5, 2, 2, 2))) == 5 and sizes == [2, 2, 1]


def test_latents_of_minus_one_to_one_are_black_to_white():
    vae = a_vae()
    for value, shown in ((-1.0, 0.0), (-0.5, 0.25), (0.0, 0.5), (1.0, 1.0), (3.0, 1.0)):
        z = torch.full((1, 2, 1, 1), value)
        assert (vae.decode(z) == shown).all() and (vae.decode_now(z) == shown).all()
    assert (vae.decode_now(torch.full((1, 2, 1, 1), torch.nan)) == 0.5).all(), "grey"
    for shown, value in ((0.0, -1.0), (0.25, -0.5), (1.0, 1.0)):
        assert torch.allclose(a_vae(4).encode(torch.full((1, 4, 4, 3), shown)), torch.tensor(value))


def test_every_network_goes_to_its_own_devices():
    """Devices by what they are for; none of them exists here."""
    names = ("get_torch", "unet_offload", "text_encoder", "text_encoder_offload", "vae", "vae_offload")
    fake_comfy.state.places.update({name: f"cuda:{i}" for i, name in enumerate(names)})
    fake_comfy.state.places["intermediate"] = "meta"
    found = [
        host.devices.get_compute_device(),
        host.devices.get_offload_device(),
        host.devices.get_text_device(),
        host.devices.get_text_offload_device(),
        host.devices.get_vae_device(),
        host.devices.get_vae_offload_device(),
    ]
    assert [device.index for device in found] == [0, 1, 2, 3, 4, 5]

    vae = FastARVAE(TinyVAE(), "tiny", 4, 2, 8, [(16, 16)])
    assert vae.device.index == 4 and vae.output_device.type == "meta"
    assert (vae.patcher.load_device.index, vae.patcher.offload_device.index) == (4, 5)
    model = Loaded.of(tiny_tar())
    assert (model.patcher.load_device.index, model.patcher.offload_device.index) == (0, 1)

    made = host.devices.to_output(torch.zeros(2, dtype=torch.float16))
    assert made.dtype == torch.float32 and made.device.type == "meta"


@pytest.mark.parametrize(
    ("pixels", "size"),
    [
        ((32, 16), (32, 16)),
        ((16, 16), (16, 16)),
        ((300, 200), (32, 16)),  # 3 : 2 is 4/3 of the way to 2 : 1, and 3/2 from the square
        ((280, 200), (16, 16)),  # 7 : 5, 1.43 and 1.4
        ((200, 300), (16, 32)),
        ((200, 280), (16, 16)),
        ((290, 200), (32, 16)),  # 1.38 and 1.45, although the difference from 2 is larger than that from 1
        ((100, 999), (16, 32)),
    ],
)
def test_an_image_of_no_size_of_the_models_is_encoded_at_that_of_the_most_similar_shape(pixels, size):
    """The side ratios differ by a factor, so that tall and wide images are treated alike."""
    vae = FastARVAE(TinyVAE(), "tiny", 4, 2, 8, [(16, 16), (32, 16), (16, 32)])
    assert vae.size_for(torch.zeros(1, 3, *pixels)) == size


@pytest.fixture
def enlarging() -> FastARVAE:
    """Of a model whose images are 16 x 8 or square, encoded by 4, and decoded four times larger."""
    torch.manual_seed(0)
    part = EnlargingConfig(width=4, fine=4, blocks=(0, 0, 0))
    config = KLConfig(ch=4, ch_mult=(1, 1, 1), blocks=1, z_channels=2, groups=2, enlarging=part)
    net = KLAutoencoder(config).eval().requires_grad_(False)
    return FastARVAE(net, "large", 4, 2, 4, [(8, 8), (16, 8)], "kl", enlarges=4)


def test_core_reads_two_ratios_of_a_decoder_that_enlarges(enlarging):
    assert enlarging.spacial_compression_encode() == 4 and enlarging.spacial_compression_decode() == 16


@pytest.mark.parametrize("size", [(8, 8), (32, 32), (16, 8), (64, 32)])
def test_what_was_decoded_is_encoded_to_latents_of_the_same_size(enlarging, size):
    """An image of the encoder's size too, so that one may edit either; both are decoded to the larger size."""
    z = enlarging.encode(torch.rand(1, *size, 3))
    assert z.shape == (1, 2, 2 * size[0] // size[1], 2)
    assert enlarging.decode(z).shape == (1, 32 * size[0] // size[1], 32, 3)


def test_a_decoder_that_enlarges_takes_one_tile_only(enlarging, tiles, monkeypatch):
    """Smaller tiles are useless, see lab/experiments/tiles.py."""
    enlarging.decode_tiled(torch.zeros(1, 2, 6, 10), tile_x=10, tile_y=6, overlap=2)
    enlarging.encode_tiled(torch.zeros(1, 32, 32, 3), tile_x=8, tile_y=8)
    decoded, encoded = tiles
    assert (decoded["size"], decoded["tile"], decoded["scale"]) == ((6, 10), (6, 10), 16)
    assert (encoded["size"], encoded["tile"], encoded["scale"]) == ((8, 8), (8, 8), 0.25)

    refused = "the decoder large cannot work in tiles, .*"
    with pytest.raises(UserError, match=f"^samples: {refused}; use VAE Decode instead, and if"):
        enlarging.decode_tiled(torch.zeros(1, 2, 6, 10), tile_x=10, tile_y=5)
    with pytest.raises(UserError, match=f"^pixels: {refused}; use VAE Encode instead, and if"):
        enlarging.encode_tiled(torch.zeros(1, 32, 32, 3), tile_x=4, tile_y=8)

    monkeypatch.setattr(enlarging, "_decode", lambda *_: (_ for _ in ()).throw(RuntimeError("out of memory")))
    with pytest.raises(UserError, match=f"^samples: {refused}; there is not enough memory to decode the whole image"):
        enlarging.decode(torch.zeros(1, 2, 65, 2))


@pytest.mark.parametrize("kind", ["kl", "vq"])
def test_memory_of_a_decoder_that_enlarges(enlarging, kind):
    """Of a VQ tokenizer as core estimates it at the encoder's size, and what the part holds."""
    enlarging.kind = kind
    net = enlarging.first_stage_model
    expected = net.decode_bytes(1, 3, 5) if kind == "kl" else 4 * (17 * 4 * 240 + net.enlarge.live_values(240))
    assert enlarging.memory_used_decode((9, 2, 3, 5), torch.float32) == expected


def test_progress_stays_within_its_total():
    report = host.progress.callback()
    report(2, 5)
    report(7, 5)  # a file that is longer than announced
    report(1, 0)  # a length that is not known
    assert [(done, total) for done, total, _ in fake_comfy.Progress.updates] == [(2, 5), (5, 5)]


@pytest.fixture
def node_runs(monkeypatch):
    """Let a node with the inputs of those names run."""

    def run(*inputs: str) -> None:
        prompt = {"4": {"class_type": "Other", "inputs": dict.fromkeys(inputs, 1)}}
        monkeypatch.setattr(fake_comfy.state, "running", [(0, "run", prompt, {})])
        monkeypatch.setattr(fake_comfy.state, "context", SimpleNamespace(prompt_id="run", node_id="4"))

    return run


@pytest.mark.parametrize("name", ["length", "video_frames", "frame_idx", "noise_augmentation"])
def test_a_node_for_videos_gets_a_sentence(name, node_runs):
    """It would make one video of a batch of images."""
    node_runs("vae", "width", name)
    for ask in (lambda vae: vae.encode(torch.zeros(5, 16, 16, 3)), lambda vae: vae.spacial_compression_encode()):
        with pytest.raises(UserError, match=r"^vae: tiny is for single images, but this node is for videos; connect"):
            ask(a_vae())


def test_a_node_for_images_encodes(node_runs):
    node_runs("vae", "pixels")
    assert a_vae().encode(torch.zeros(5, 16, 16, 3)).shape == (5, 2, 4, 4)
    fake_comfy.state.context.node_id = "5"  # added by a node that runs
    assert a_vae().encode(torch.zeros(1, 16, 16, 3)).shape == (1, 2, 4, 4)


def test_what_nodes_for_sounds_and_meshes_look_for_is_a_sentence(enlarging):
    with pytest.raises(UserError, match=r"^vae: large is for single images, but this node is for sounds; connect"):
        _ = enlarging.audio_sample_rate
    with pytest.raises(UserError, match=r"^vae: this node needs 'octree_resolution', .* single images only; connect"):
        enlarging.decode(torch.zeros(1, 2, 2, 2), {"octree_resolution": 256})


@pytest.mark.parametrize("kind", DECODERS)
def test_a_network_without_a_name_says_so_and_answers_hasattr(kind):
    net = DECODERS[kind](Path(fastar_nodes.__file__).parent / "demo" / "checkpoints" / f"{kind}.safetensors").net
    assert not hasattr(net, "decode_structure") and getattr(net, "comfy_has_chunked_io", False) is False
    assert net.decoder is net.get_submodule("decoder")
    with pytest.raises(UserError, match="needs 'decode_structure', .* single images only; connect a different"):
        net.decode_structure(torch.zeros(1))


def test_results_have_the_dtype_of_cores_vaes(monkeypatch):
    """fp16 where ComfyUI was started with --fp16-intermediates."""
    vae = a_vae()
    assert vae.vae_output_dtype() == vae.decode(torch.zeros(1, 2, 2, 2)).dtype == torch.float32
    monkeypatch.setattr(fake_comfy.state, "intermediate_dtype", torch.float16)
    assert vae.vae_output_dtype() == vae.decode(torch.zeros(1, 2, 2, 2)).dtype == torch.float16
    assert vae.encode(torch.zeros(1, 16, 16, 3)).dtype == torch.float16


def test_another_pack_decodes_with_the_network_and_the_two_functions():
    """Core's process_output works in place, and some ignore its result."""
    vae, images = a_vae(), torch.rand(1, 16, 16, 3)
    latents = vae.first_stage_model.encode(vae.process_input(images).movedim(-1, 1))[0]
    assert torch.equal(latents, vae.encode(images))

    pixels = vae.first_stage_model.decode(latents)
    vae.process_output(pixels)
    assert torch.equal(pixels.movedim(1, -1), vae.decode(latents))


VAES = {"kl": lambda: a_mar().vae, "vq": a_vq, "binary": lambda: a_block().vae, "nextstep": lambda: a_nextstep().vae}


@pytest.mark.parametrize("kind", VAES)
def test_whatever_others_left_in_torch(kind):
    """VAE Encode and VAE Decode are core's nodes: the state is the decoder's to set."""
    vae = VAES[kind]()
    pictures = torch.rand(1, *vae.sizes[0], 3, generator=torch.Generator().manual_seed(0))
    tiles = kind != "binary"

    def made():
        latents = vae.encode(pictures)
        in_tiles = [vae.encode_tiled(pictures), vae.decode_tiled(latents)] if tiles else []
        return [latents, vae.decode(latents), vae.decode_now(latents), *in_tiles]

    plain = made()
    with STATES["everything"]():
        found = state_of_torch()
        again = made()
        assert state_of_torch() == found
    assert all(one.dtype == other.dtype and torch.equal(one, other) for one, other in zip(again, plain, strict=True))
