"""Captions cleaned as the reference cleans them; the expected texts were recorded from its code, with ftfy."""

import pytest
from fastar_nodes.model_loaders.llamagen import captions
from fastar_nodes.model_loaders.llamagen.captions import clean


@pytest.mark.parametrize(
    ("caption", "expected"),
    [
        ("A Red Boat, at sunset", "a red boat, at sunset"),
        ("A <b>Red</b> boat &amp; a cat", "a red boat a cat"),
        ("see https://example.com/a/b.html now", "see html now"),
        ("www.shop.co/x free shipping worldwide", "worldwide"),
        ("by @nick_1 on insta", "by on insta"),
        ("IMG_1234.JPG a dog", "a dog"),
        ("jc6640vc cat 123456 #12 #123456 dog", "cat dog"),
        ("this-is-my-cute-cat", "this is my cute cat"),
        ("\u201cHello\u201d \u2014 world\u2026", '"hello" - world\u2026'),
        ("caf\xe9 \ufb01ne  \uff26\uff35\uff2c\uff2c width", "caf\xe9 fine full width"),
        ("<person> rides a horse", "person rides a horse"),
        ("\u732b cat \u72ac", "cat"),
        ("a+b%20c", "a b c"),
        ("10x20 cm image page 12", "cm image"),
        ('"quoted"', "quoted"),
        (".hidden", ""),
        ("a , b : c", "a , b: c"),
        ("foo.bar,baz/qux", "foo. bar, baz qux"),
        (" \\n line \n two", "line two"),
        ("<3 hearts > 2", "<3 hearts > 2"),
        ("<!-- c --> x <script>var a</script> y", "x y"),
        ("&lt;b&gt; bold", "bold"),
        ("click for more, download free", ""),
        ("article 3:45  ", "article 3:45"),
        ("192.168.0.1 host", "host"),
        ("***SALE***", "sale"),
        ("a2d1a2a in a box", "in a box"),
        ("6640vc231", ""),
        ("...", ""),
        ("", ""),
        ("A|B\\C/D*E", "a b c d e"),
        ("\xbd cup", "cup"),
        ("&foo; bar", "foo bar"),
        ("&#65; &#x42;", "a b"),
        ("\x1b[31mred\x1b[0m", "31mred 0m"),
        ("it's a dog's life", "it's a dog's life"),
        ("a_b_c_d_e", "a b c d e"),
        ("user@mail.com", "user"),
        ("a<script>b</script>c</script>", "ac"),
        ("<i\nx='1'>a</i>c<!-- <b> -->", "ac"),
        ("a<style>b<b>c</b></style>c", "ac"),
    ],
)
def test_recorded_captions(caption: str, expected: str) -> None:
    assert clean(caption) == expected


def test_wrongly_decoded_text_stays() -> None:
    assert clean("don\u00e2\u20ac\u2122t").startswith("don\u00e2\u20ac")


@pytest.mark.parametrize(
    "text",
    ["a." * 10**5, "<b " * 10**5, "a1" * 10**5 + "_", " " * 10**5, "&#" + "9" * 10**5 + ";", "<![cdata[" * 10**4],
)
def test_of_a_pasted_book_only_the_beginning_is_read(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some rules take a time that grows with the square of the length."""
    apply_rules = captions._once

    def once(caption: str) -> str:
        assert len(caption) <= 2000
        return apply_rules(caption)

    monkeypatch.setattr(captions, "_once", once)
    out = clean(text)
    assert "\n" not in out and len(out) <= 4000
