"""Images that Python and the command line read: upright, in their whole range of values, and masks with alpha."""

from pathlib import Path

import numpy as np
import pytest
import torch
from fastar_nodes import UserError, load
from fastar_nodes.runs.images import batch_of, images_of, masks_given, one_for_each
from janus_images import one_file
from PIL import Image, ImageDraw, ImageOps

SIDE = 16
QUICK = {"steps": 4, "diffusion_steps": 2}


@pytest.fixture(scope="module")
def janus(tmp_path_factory) -> str:
    """The file of a Janus that edits."""
    return str(one_file(tmp_path_factory.mktemp("editor") / "tiny.safetensors"))


@pytest.fixture(scope="module")
def editor(janus):
    return load(janus, dtype="fp32", device="cpu")


@pytest.fixture(scope="module")
def of_mar(files):
    return load(model=files.mar, decoder=files.kl, device="cpu", dtype="fp32")


@pytest.fixture
def turned(tmp_path):
    """The path of a photo that is stored lying, and the image that viewers show."""
    pixels = np.random.default_rng(1).integers(0, 256, (SIDE, SIDE, 3), dtype=np.uint8)
    photo = Image.fromarray(pixels)
    exif = photo.getexif()
    exif[0x112] = 6  # the camera was held upright
    photo.save(tmp_path / "photo.png", exif=exif)
    return tmp_path / "photo.png", Image.fromarray(np.rot90(pixels, -1))


# ------------------------------------------------------------------------------------------------ orientation


def test_every_entrance_of_an_editor_reads_a_photo_upright(editor, turned):
    path, shown = turned
    edited = editor.sample("night", image=shown, seed=1).latents
    answer = editor.ask(shown, "What?", limit=8)
    for image in (path, str(path), Image.open(path), Image.open(path).convert("RGBA"), [path]):
        assert torch.equal(editor.sample("night", image=image, seed=1).latents, edited)
        assert torch.equal(editor.encode(image), editor.encode(shown))
        assert editor.ask(image, "What?", limit=8) == answer
    assert not torch.equal(editor.sample("night", image=np.asarray(Image.open(path)), seed=1).latents, edited)


def test_inpainting_reads_image_and_mask_upright(of_mar, tmp_path, turned):
    path, shown = turned
    mask = Image.new("L", (SIDE, SIDE))
    mask.paste(255, (0, 0, SIDE, SIDE // 2))
    exif = mask.getexif()
    exif[0x112] = 3  # upside down
    mask.save(tmp_path / "mask.png", exif=exif)
    flipped = np.asarray(mask)[::-1]

    wanted = of_mar("cat", image=shown, mask=flipped, seed=1, **QUICK)[0][0]
    for given in (tmp_path / "mask.png", Image.open(tmp_path / "mask.png"), [mask]):
        assert np.array_equal(of_mar("cat", image=path, mask=given, seed=1, **QUICK)[0][0], wanted)


@pytest.mark.parametrize("orientation", range(1, 9))
def test_all_orientations(tmp_path, orientation):
    pixels = np.random.default_rng(2).integers(0, 256, (5, 7, 3), dtype=np.uint8)
    image = Image.fromarray(pixels)
    exif = image.getexif()
    exif[0x112] = orientation
    image.save(tmp_path / "a.png", exif=exif)
    shown = np.asarray(ImageOps.exif_transpose(Image.open(tmp_path / "a.png")))
    assert shown.shape == ((5, 7, 3) if orientation < 5 else (7, 5, 3))
    assert np.array_equal(batch_of(tmp_path / "a.png")[0], shown)
    assert np.array_equal(one_for_each(str(tmp_path / "a.png"), 1)[0], shown)


# ------------------------------------------------------------------------------------------------ depths

RAMP = np.tile(np.linspace(0, 1, 64), (8, 1))
WANTED = (RAMP * 255).round()


def sixteen(order: str) -> np.ndarray:
    return (RAMP * 65535).round().astype(f"{order}u2")


DEPTHS = {
    "I;16": lambda: Image.fromarray(sixteen("<")),
    "I;16B": lambda: Image.fromarray(sixteen(">")),
    "I of 16 bits": lambda: Image.fromarray(sixteen("<").astype(np.int32)),
    "I of 8 bits": lambda: Image.fromarray(WANTED.astype(np.int32)),
    "F up to 1": lambda: Image.fromarray(RAMP.astype(np.float32)),
    "F up to 255": lambda: Image.fromarray(WANTED.astype(np.float32)),
    "F up to 65535": lambda: Image.fromarray(sixteen("<").astype(np.float32)),
    "F beyond white, as a filter leaves it": lambda: Image.fromarray((RAMP * 1.02 - 0.01).astype(np.float32)),
    "L": lambda: Image.fromarray(WANTED.astype(np.uint8)),
}


@pytest.mark.parametrize("depth", DEPTHS)
def test_values_are_scaled_to_eight_bits(depth):
    image = DEPTHS[depth]()
    tolerance = 3 if "filter" in depth else 1
    read = (
        batch_of(image)[0, ..., 1],
        one_for_each(image, 1)[0][..., 2].numpy(),
        masks_given(image)[0].numpy() * 255,
    )
    for found in read:
        assert np.abs(found.astype(float) - WANTED).max() <= tolerance


def save_sixteen(values: np.ndarray, path: Path) -> None:
    """Save uint16 [h, w]. Pillow before 11 writes no PGM of 16 bits."""
    if path.suffix == ".pgm":
        height, width = values.shape
        path.write_bytes(b"P5 %d %d 65535\n" % (width, height) + values.astype(">u2").tobytes())
    else:
        Image.fromarray(values).save(path)


@pytest.mark.parametrize("name", ["a.png", "a.tif", "a.pgm"])
def test_files_of_sixteen_bits(tmp_path, name):
    save_sixteen(sixteen("<"), tmp_path / name)
    assert np.abs(batch_of(tmp_path / name)[0, ..., 0] - WANTED).max() <= 1
    assert np.abs(masks_given(tmp_path / name)[0].numpy() * 255 - WANTED).max() <= 1


@pytest.mark.parametrize("name", ["a.png", "a.pgm"])
def test_a_dark_file_of_sixteen_bits_stays_dark(tmp_path, name):
    """The file states 16 bits, whatever its largest value."""
    save_sixteen(np.full((4, 4), 100, np.uint16), tmp_path / name)
    assert not batch_of(tmp_path / name).any() and not masks_given(tmp_path / name).any()


@pytest.mark.parametrize(
    "mask",
    [
        sixteen("<"),
        sixteen(">"),
        sixteen("<").astype(np.int64),
        WANTED.astype(np.int32),
        WANTED.astype(np.uint8),
        RAMP,
        torch.from_numpy(sixteen("<")),
        torch.from_numpy(WANTED.astype(np.int16)),
    ],
    ids=lambda mask: str(mask.dtype),
)
def test_the_type_of_an_array_states_its_white(mask):
    assert np.abs(masks_given(mask)[0].numpy() - RAMP).max() < 1 / 255
    both = masks_given([mask, Image.fromarray(WANTED.astype(np.uint8))])
    assert both.shape == (2, 8, 64) and np.abs(both.numpy() - RAMP).max() < 1 / 255


def test_numbers_without_a_white_are_refused():
    for numbers in (np.full((4, 4), 1 << 30, np.int32), np.full((4, 4), np.nan, np.float32)):
        with pytest.raises(UserError, match="^image: it holds numbers up to .*; give an 8-bit or 16-bit"):
            batch_of(Image.fromarray(numbers))
        with pytest.raises(UserError, match="^mask: it holds numbers up to"):
            masks_given(Image.fromarray(numbers))


# ------------------------------------------------------------------------------------------------ masks with alpha


def stroke(colour: tuple[int, int, int], rest: tuple[int, int, int]) -> Image.Image:
    """A stroke over the upper quarter of a transparent layer, whose rest has a colour too."""
    layer = Image.new("RGBA", (SIDE, SIDE), (*rest, 0))
    ImageDraw.Draw(layer).rectangle((0, 0, SIDE, SIDE // 4 - 1), fill=(*colour, 255))
    return layer


def palette(layer: Image.Image) -> Image.Image:
    """A layer with a palette, of which one colour is transparent."""
    made = Image.fromarray((np.asarray(layer)[..., 3] > 0).astype(np.uint8), "P")
    made.putpalette([255, 255, 255] * 2)
    made.info["transparency"] = 0
    return made


WHITE, BLACK = (255, 255, 255), (0, 0, 0)
LAYERS = {
    "RGBA": lambda: stroke(WHITE, WHITE),
    "LA": lambda: stroke(WHITE, WHITE).convert("LA"),
    "PA": lambda: stroke(WHITE, WHITE).convert("PA"),
    "P": lambda: palette(stroke(WHITE, WHITE)),
    "on transparent black": lambda: stroke(WHITE, BLACK),
}
UPPER = np.arange(SIDE)[:, None].repeat(SIDE, 1) < SIDE // 4


@pytest.mark.parametrize("layer", LAYERS)
def test_what_is_transparent_is_not_painted(layer, tmp_path):
    mask = LAYERS[layer]()
    if layer == "PA" and mask.getchannel("A").getextrema() == (255, 255):
        pytest.skip("this Pillow drops the alpha of a PA")

    mask.save(tmp_path / "mask.png" if mask.mode != "PA" else tmp_path / "mask.tif")
    (file,) = tmp_path.iterdir()
    for given in (mask, file, str(file), [mask]):
        assert np.array_equal(masks_given(given)[0].numpy(), UPPER)


def test_half_transparent_is_half_painted():
    mask = Image.new("LA", (2, 2), (255, 128))
    assert np.allclose(masks_given(mask).numpy(), 128 / 255)


def test_a_black_stroke_is_refused_with_the_remedy(of_mar):
    start = of_mar.sample("cat", seed=1, **QUICK).latents
    for mask in (stroke(BLACK, BLACK), stroke(BLACK, WHITE), [stroke(WHITE, WHITE), stroke(BLACK, WHITE)]):
        with pytest.raises(UserError, match="^mask: the mask is black wherever it is not transparent.*; paint white"):
            of_mar.sample("cat", image=start, mask=mask, seed=2, **QUICK)
    with pytest.raises(UserError, match="^mask: it is empty"):
        of_mar.sample("cat", image=start, mask=Image.new("RGBA", (4, 4)), seed=2, **QUICK)


# ------------------------------------------------------------------------------------------------ refusals


def test_what_pillow_cannot_read_is_one_sentence(tmp_path, turned):
    path, _ = turned
    (tmp_path / "cut.png").write_bytes(path.read_bytes()[:-60])
    for given in (tmp_path / "cut.png", Image.open(tmp_path / "cut.png"), Image.new("La", (4, 4))):
        for read, field in ((batch_of, "image"), (masks_given, "mask"), (images_of, "image")):
            with pytest.raises(UserError, match=f"^{field}: .* cannot be read as an image"):
                read(given)


def test_masks_of_different_sizes_are_refused():
    with pytest.raises(UserError, match="^mask: the masks have different shapes"):
        masks_given([np.ones((4, 4)), np.ones((4, 5))])
    with pytest.raises(UserError, match="^mask: the list is empty"):
        masks_given([])
