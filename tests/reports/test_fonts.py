"""Text in scripts that Pillow's own font does not have: by fonts of the machine, else as code points."""

import io
import logging

import numpy as np
import pytest
from fastar_nodes.reports import fonts
from fastar_nodes.reports.drawing import Canvas, Ink, text_width
from PIL import Image, ImageDraw, ImageFont

SCRIPTS = {"Chinese": "猫船", "Japanese": "かな", "Korean": "고양", "Arabic": "شم", "Cyrillic": "дж", "Latin": "éß"}


def drawn(text: str, size: int = 24) -> np.ndarray:
    canvas = Canvas(200, 60, (0, 0, 0))
    canvas.write(4, 4, text, size)
    return canvas.pixels[..., 0]


def forget() -> None:
    for cached in (fonts._files, fonts._best, fonts._has, fonts._say_missing, fonts._opened):
        cached.cache_clear()


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The only folder of fonts of this machine."""
    monkeypatch.setattr(fonts, "_FOLDERS", (str(tmp_path),))
    monkeypatch.setattr(fonts, "_OWN_FOLDERS", ())
    monkeypatch.setattr(fonts, "_of_matplotlib", list)
    forget()
    yield tmp_path
    forget()


def a_font(characters: dict[str, int]) -> bytes:
    """A font with a full square for each of these characters, of that many thousandths of its size."""
    builder = pytest.importorskip("fontTools.fontBuilder", reason="NOT TESTED: fontTools is not installed")
    from fontTools.pens.ttGlyphPen import TTGlyphPen

    def square(side: int):
        pen = TTGlyphPen(None)
        pen.moveTo((0, 0))
        for corner in ((0, side), (side, side), (side, 0)):
            pen.lineTo(corner)
        pen.closePath()
        return pen.glyph()

    names = {character: f"u{ord(character):X}" for character in characters}
    made = builder.FontBuilder(1000)
    made.setupGlyphOrder([".notdef", *names.values()])
    made.setupCharacterMap({ord(character): name for character, name in names.items()})
    made.setupGlyf({".notdef": square(100), **{names[c]: square(side) for c, side in characters.items()}})
    made.setupHorizontalMetrics({name: (1000, 0) for name in (".notdef", *names.values())})
    made.setupHorizontalHeader(ascent=800, descent=-200)
    made.setupOS2()
    made.setupPost()

    file = io.BytesIO()
    made.save(file)
    return file.getvalue()


@pytest.mark.parametrize("size", [13, 15, 18])
def test_english_is_drawn_as_by_pillow(size):
    text = "FastHybrid 1.92x, 0.95 | (a) ~ #7"
    image = Image.new("RGB", (200, 60), (0, 0, 0))
    ImageDraw.Draw(image).text((4, 4), text, Ink.TEXT, ImageFont.load_default(size))
    assert (drawn(text, size) == np.asarray(image)[..., 0]).all()
    assert text_width(text, size) == ImageFont.load_default(size).getlength(text)


def test_without_a_font_a_character_is_its_code_and_the_script_is_said_once(folder, caplog):
    with caplog.at_level(logging.WARNING):
        looks = [drawn(character).tobytes() for pair in SCRIPTS.values() for character in pair + pair]
        looks += [drawn(character).tobytes() for character in "\U0001f600\U0001f601"]
    assert len(set(looks)) == 2 * len(SCRIPTS) + 2

    said = [record.getMessage() for record in caplog.records]
    assert len(said) == len(SCRIPTS) + 1
    for name in (*SCRIPTS, "some symbols"):
        assert sum(f"no font on this machine has {name};" in line for line in said) == 1


def test_a_font_that_has_the_characters_is_found(folder, caplog):
    (folder / "deep" / "er").mkdir(parents=True)
    (folder / "deep" / "er" / "Squares.TTF").write_bytes(a_font({"猫": 700, "船": 400, "\U00020000": 300}))

    for character, side in (("猫", 700), ("船", 400), ("\U00020000", 300)):
        pixels = drawn(character, 20) > 127
        assert pixels.sum() == pytest.approx((side * 20 / 1000) ** 2, abs=1)
    assert not caplog.records

    # What no font has is its code; the font that has most serves.
    (folder / "Few.ttf").write_bytes(a_font({"か": 700}))
    forget()
    assert fonts.fitting("猫か船", 20)[1] == "猫[304B]船"
    assert "Japanese" in caplog.text


def test_damaged_fonts_are_passed_over(folder):
    whole = a_font({"猫": 700})
    (folder / "z.ttf").write_bytes(whole)
    (folder / "c.ttf").mkdir()
    for i in range(0, len(whole), 7):
        (folder / f"a{i}.ttf").write_bytes(whole[:i])
    assert (drawn("猫", 20) > 127).sum() == 14 * 14


def test_dejavu_of_matplotlib_serves_where_the_machine_has_no_font(folder, monkeypatch):
    pytest.importorskip("matplotlib", reason="NOT TESTED: matplotlib is not installed")
    monkeypatch.undo()
    monkeypatch.setattr(fonts, "_FOLDERS", ())
    monkeypatch.setattr(fonts, "_OWN_FOLDERS", ())
    forget()
    assert fonts.fitting("дé", 20)[1] == "дé" and "DejaVuSans.ttf" in str(fonts._best(frozenset("дé")))
