"""The training of MuLo-SD's latent samplers: what it learns, its losses, and the command on a folder of images."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import tiny_demo as tiny
import torch
from fastar_nodes.lab.training import latent_command as command
from fastar_nodes.lab.training import latent_recipe as recipe
from fastar_nodes.lab.training import picture_book
from fastar_nodes.lab.training.training import Job, generator, seeded
from fastar_nodes.model_loaders.autoencoders.latent_samplers import fits, load_latent_samplers
from fastar_nodes.model_loaders.autoencoders.loader import load_vq
from fastar_nodes.networks.autoencoder import VQAutoencoder
from fastar_nodes.networks.latent_samplers import LatentSamplers
from PIL import Image

SMALL = tiny.LATENT_SAMPLERS


def a_vq() -> VQAutoencoder:
    return seeded(0, lambda: VQAutoencoder(tiny.VQ)).eval().requires_grad_(False)


def samplers(vq: VQAutoencoder) -> LatentSamplers:
    net = seeded(1, lambda: LatentSamplers(SMALL.config(vq, 2)))
    net.codebook.embedding.weight.data.copy_(vq.quantize.unit())
    return net


def test_a_pair_is_an_image_and_the_average_of_its_areas(tmp_path):
    vq, images = a_vq(), recipe.BookImages(3, 64)
    pairs = recipe.cached_pairs(Job(tmp_path, log=str), vq, images, 2)
    assert pairs.small.shape == (3, 4, 4) and pairs.large.shape == (3, 8, 8)

    scenes = picture_book.scenes(1, 3)
    rgb = picture_book.render(scenes, 64)[0].astype(np.float32)
    halved = rgb.reshape(3, 32, 2, 32, 2, 3).mean((2, 4))
    for codes, pixels in ((pairs.large, rgb), (pairs.small, halved)):
        _, wanted = vq.encode(torch.from_numpy(pixels / 127.5 - 1).permute(0, 3, 1, 2))
        assert (codes == wanted).float().mean() > 0.95

    # They are kept for the tokenizer, the images and the ratio.
    again = recipe.cached_pairs(Job(tmp_path, log=str), vq, images, 2)
    assert torch.equal(again.large, pairs.large)
    assert len(recipe.cached_pairs(Job(tmp_path, log=str), vq, replace(images, count=2), 2).small) == 2


def test_the_token_loss_is_least_at_the_codes_themselves():
    vq = a_vq()
    net = samplers(vq)
    codes = torch.randint(32, (2, 3, 3), generator=generator(3, 0))
    least, right = recipe.token_loss(net, net.vectors(codes), codes)
    other, wrong = recipe.token_loss(net, net.vectors((codes + 1) % 32), codes)
    assert least < other and right == 1 and wrong == 0

    # By its definition.
    logits = net.vectors(codes).permute(0, 2, 3, 1) @ net.codebook.unit().T / recipe.TEMPERATURE
    wanted = -logits.log_softmax(-1).gather(-1, codes[..., None]).mean()
    torch.testing.assert_close(least, wanted)


def test_the_image_is_that_of_the_codes_and_its_gradient_that_of_the_vectors():
    vq = a_vq()
    net = samplers(vq)
    made = torch.nn.functional.normalize(torch.randn(1, 8, 3, 3, generator=generator(5, 0)), dim=1).requires_grad_()
    image = recipe.decoded(vq, net, made)
    torch.testing.assert_close(image, vq.decode_codes(net.nearest(made)))

    (through,) = torch.autograd.grad(image.sum(), made)
    chosen = net.vectors(net.nearest(made)).detach().requires_grad_()
    (wanted,) = torch.autograd.grad(vq.decoder(vq.post_quant_conv(chosen)).sum(), chosen)
    torch.testing.assert_close(through, wanted, rtol=1e-3, atol=1e-4)


def test_the_discriminator_learns_from_images_and_the_network_from_the_discriminator():
    """Each of the two hinge losses moves one of them."""
    stage = seeded(2, lambda: recipe._SecondStage(torch.nn.Identity()))
    drawn = (torch.rand(2, 3, 32, 32, generator=generator(7, 0)) * 2 - 1).requires_grad_()
    wanted = torch.rand(2, 3, 32, 32, generator=generator(7, 1)) * 2 - 1
    stage.adversarial_loss(drawn, wanted).backward()

    of_drawn, of_wanted = stage.discriminator(drawn.detach()), stage.discriminator(wanted)
    own = torch.relu(1 + of_drawn).mean() + torch.relu(1 - of_wanted).mean()
    weights = list(stage.discriminator.parameters())
    for weight, gradient in zip(weights, torch.autograd.grad(own, weights), strict=True):
        torch.testing.assert_close(weight.grad, gradient)

    again = drawn.detach().requires_grad_()
    (fooled,) = torch.autograd.grad(-recipe.PATCHGAN_WEIGHT * stage.discriminator(again).mean(), again)
    torch.testing.assert_close(drawn.grad, fooled)


@pytest.mark.parametrize("side", [3, 8])
def test_a_crop_of_cells_has_its_pixels(side):
    pixels = torch.arange(5 * 4).repeat_interleave(1)[None].expand(20, -1)  # the column, in each of 20 rows
    cells = torch.arange(5)[None].expand(5, -1)
    seen = set()
    for step in range(20):
        of_cells, of_pixels = recipe.crop(5, side, 4, generator(8, step))
        chosen, image = cells[of_cells], pixels[of_pixels]
        assert chosen.shape == (min(side, 5),) * 2 and image.shape == tuple(4 * n for n in chosen.shape)
        assert (image[0] // 4)[::4].tolist() == chosen[0].tolist()
        seen.add(int(chosen[0, 0]))
    assert len(seen) == (3 if side == 3 else 1)


@pytest.mark.slow
@pytest.mark.parametrize("losses", recipe.LOSSES)
def test_a_training_learns_and_its_file_loads(losses, tmp_path):
    vq, images = a_vq(), recipe.BookImages(100, 64)
    schedule = replace(SMALL.first, steps=60, batch=8, warmup=5)
    chosen = replace(SMALL, first=schedule, second=replace(SMALL.second, steps=3, batch=2), crop=4)
    log: list[str] = []
    job = Job(tmp_path / "work", log=log.append)
    net = recipe.train_latent_samplers(job, tmp_path / "own.safetensors", vq, images, 2, chosen, losses, "own")

    pairs = recipe.cached_pairs(job, vq, images, 2)
    small, large = (codes[-recipe.HELD_OUT :].long() for codes in pairs)
    untrained = samplers(vq)
    for make, source, wanted in (("up", small, large), ("down", large, small)):
        right, before = ((getattr(one, make)(source) == wanted).float().mean() for one in (net, untrained))
        assert right > before + 0.3
    assert [line.split(":")[0] for line in log if "of the codes" in line] == ["up", "down"]

    loaded = load_latent_samplers(tmp_path / "own.safetensors")
    assert loaded.name == "own" and loaded.net.config == net.config
    assert (tmp_path / "own.safetensors").stat().st_size < 4 * 2**20

    # It resumes at its end: equal weights.
    again = recipe.train_latent_samplers(job, tmp_path / "again.safetensors", vq, images, 2, chosen, losses, "own")
    for name, weight in again.state_dict().items():
        assert torch.equal(weight, net.state_dict()[name]), name


@pytest.fixture
def photographs(tmp_path):
    """Images of several sizes in two folders."""
    folder = tmp_path / "images"
    (folder / "more").mkdir(parents=True)
    rgb, _ = picture_book.render(picture_book.scenes(9, 63), 64)
    for i, image in enumerate(rgb):
        name = f"more/{i}.JPG" if i % 2 else f"{i}.png"
        Image.fromarray(image).resize((40 + i, 80)).save(folder / name)
    return folder


def test_images_of_a_folder_are_cut_to_their_middle_square(photographs, tmp_path):
    images = command.FolderImages.of(photographs, 32)
    assert len(images) == 63 and images.read(torch.tensor([5, 0])).shape == (2, 3, 32, 32)

    (tmp_path / "one").mkdir()
    wide = np.zeros((8, 24, 3), np.uint8)
    wide[:, 8:16] = 200
    Image.fromarray(wide).save(tmp_path / "one" / "wide.png")
    middle = command.FolderImages((tmp_path / "one" / "wide.png",), 8).read(torch.tensor([0]))
    assert middle.min() == 200


@pytest.mark.slow
def test_the_command_trains_for_a_tokenizer_of_the_user(lab, photographs, tmp_path):
    out = tmp_path / "out" / "own.safetensors"
    line = [
        "train-latent-samplers",
        "--vq",
        "demo-vq",
        "--images",
        photographs,
        "--side",
        64,
        "--ratio",
        2,
        "--out",
        out,
    ]
    answer = lab(
        *map(str, [*line, "--work", tmp_path / "work", "--steps", 1, "--batch", 2, "--width", 8, "--device", "cpu"])
    )
    assert answer.code == 0 and answer.out.strip() == str(out)
    vq = load_vq(Path(__file__).parents[2] / "demo" / "checkpoints" / "vq.safetensors")
    assert fits(load_latent_samplers(out), vq, 2)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"--images": "nowhere"}, "images: there is no folder nowhere"),
        ({"--images": "few"}, "images: few has only 1 images"),
        ({"--side": "100"}, "side: 100 is not a multiple of 16"),
        ({"--side": "x"}, "side: "),
        ({"--ratio": "1"}, "ratio: "),
        ({"--out": "own.pt"}, "out: own.pt must end in .safetensors"),
        ({"--vq": "demo-kl"}, "decoder: "),
    ],
)
def test_mistakes(change, words, lab, sentence, photographs, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "few").mkdir()
    (photographs / "0.png").rename(tmp_path / "few" / "0.png")
    line = {"--vq": "demo-vq", "--images": str(photographs), "--side": "64", "--out": "own.safetensors"} | change
    assert sentence(lab("train-latent-samplers", *sum(line.items(), ()))).startswith(words)
