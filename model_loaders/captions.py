"""Caption cleaning of LlamaGen's text-to-image models, applied to prompts as it was to the training captions.

The rules are those of DeepFloyd IF's caption cleaner, also used by PixArt and LlamaGen (arXiv 2406.06525): lower case; no
URLs, markup, nicknames, CJK characters, file names or long ids; one kind of dash and quote. As in training, they are applied
**twice**.

The original also applies ftfy. It is used here if installed. Otherwise :func:`_plain` replaces ligatures, full-width letters,
curly quotes, line ends and control characters, and text in a wrong encoding ("cafÃ©") is left unchanged.
"""

from __future__ import annotations

import html
import re
import unicodedata
from collections.abc import Callable
from html.entities import html5 as entities
from html.parser import HTMLParser
from urllib.parse import unquote_plus

# Characters. The encoder reads 120 tokens, far fewer; some rules take seconds on a very long text.
LONGEST = 2000

_FILES = "(?:png|jpg|jpeg|bmp|webp|eps|pdf|apk|mp4)"
_SITE = r"[a-zA-Z0-9.\-]+[.](?:com|co|ru|net|org|edu|gov|it)[\w/-]*\b/?(?!@)"
_DASHES = r"\-\u058a\u05be\u1400\u1806\u2010-\u2015\u2e17\u2e1a\u2e3a\u2e3b\u2e40\u301c\u3030\u30a0\ufe31\ufe32\ufe58\ufe63\uff0d"

_Rule = tuple[re.Pattern[str], str]


def _rules(*pairs: tuple[str, str]) -> list[_Rule]:
    return [(re.compile(pattern), replacement) for pattern, replacement in pairs]


_ADDRESSES = _rules(
    ("<person>", "person"),
    # Two passes: removing an address may join the parts of another.
    (rf"\b(?:https?:(?:/{{1,3}}|[a-zA-Z0-9%])|{_SITE})", ""),
    (rf"\b(?:www:(?:/{{1,3}}|[a-zA-Z0-9%])|{_SITE})", ""),
)
_SIGNS = _rules(
    (r"@\w+\b", ""),  # nicknames
    ("[\u31c0-\u9fff]+", ""),  # CJK characters
    (f"[{_DASHES}]+", "-"),
    ("[`´«»“”¨]", '"'),
    ("[‘’]", "'"),
    ("&quot;?", ""),
    ("&amp", ""),
    (r"\d{1,3}\.\d{1,3}\.\d{1,3}\.\d{1,3}", " "),  # internet addresses
    (r"\d:\d\d\s+$", ""),  # article ids
    (r"\\n", " "),  # an escaped line end
    (r"#\d{1,3}\b", ""),
    (r"#\d{5,}\b", ""),
    (r"\b\d{6,}\b", ""),
    (rf"\S+\.{_FILES}", ""),  # file names
    ("[\"']{2,}", '"'),
    (r"\.{2,}", " "),
    (r"[#®•©™&@·º½¾¿¡§~()\[\]{}|\\/*]+", " "),
    (r"\s+\.\s+", " "),
)
_HYPHENS, _HYPHENS_KEPT = re.compile("[-_]"), 3
_SHOP = _rules(
    (r"\b[a-zA-Z]{1,3}\d{3,15}\b", ""),  # article numbers
    (r"\b[a-zA-Z]+\d+[a-zA-Z]+\b", ""),
    (r"\b\d+[a-zA-Z]+\d+\b", ""),
    (r"(worldwide\s+)?(free\s+)?shipping", ""),
    (r"(free\s)?download(\sfree)?", ""),
    (r"\bclick\b\s(?:for|on)\s\w+", ""),
    (rf"\b{_FILES}(\simages?)?", ""),
    (r"\bpage\s+\d+\b", ""),
    (r"\b\d*[a-zA-Z]+\d+[a-zA-Z]+\d+[a-zA-Z\d]*\b", " "),
    (r"\b\d+\.?\d*[xх×]\d+\.?\d*\b", ""),  # sizes; the second x is Cyrillic
    (r"\b\s+:\s+", ": "),
    (r"(\D[,./])\b", r"\1 "),
    (r"\s+", " "),
)
_ENDS = _rules(
    (r"^[\"']([\w\W]+)[\"']$", r"\1"),
    (r"^['_,\-:;]", ""),
    (r"['_,\-:+]$", ""),
    (r"^\.\S+$", ""),
)


def clean(caption: str) -> str:
    """Clean a caption for the text encoder.

    Returns:
        One line of text, possibly empty. Characters beyond the first 2000 are ignored.
    """
    for _ in range(2):
        caption = _once(caption[:LONGEST])
    return caption


def _once(caption: str) -> str:
    """Apply all rules once."""
    caption = _apply(_ADDRESSES, unquote_plus(caption).strip().lower())
    caption = _apply(_SIGNS, _without_markup(caption))
    if len(_HYPHENS.findall(caption)) > _HYPHENS_KEPT:  # this-is-my-cute-cat
        caption = _HYPHENS.sub(" ", caption)
    caption = html.unescape(html.unescape(_fixer()(caption))).strip()
    return _apply(_ENDS, _apply(_SHOP, caption)).strip()


def _apply(rules: list[_Rule], text: str) -> str:
    for pattern, replacement in rules:
        text = pattern.sub(replacement, text)
    return text


class _Text(HTMLParser):
    """Collects the visible text of HTML; unknown character references are kept without their semicolon."""

    def __init__(self) -> None:
        super().__init__(convert_charrefs=False)
        self.parts: list[str] = []
        self.hidden: list[str] = []

    def handle_charref(self, name: str) -> None:
        number = int(name[1:], 16) if name[0] in "xX" else int(name)
        if number < 256:
            self.handle_data(bytes([number]).decode("windows-1252", "replace"))
        else:
            self.handle_data(chr(number) if number <= 0x10FFFF else "\ufffd")

    def handle_entityref(self, name: str) -> None:
        self.handle_data(entities.get(f"{name};") or f"&{name}")

    def unknown_decl(self, data: str) -> None:
        if data[:6].upper() == "CDATA[":
            self.handle_data(data[6:])

    def handle_starttag(self, tag: str, attrs: object) -> None:
        if tag in ("script", "style", "template"):
            self.hidden.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag in self.hidden:
            self.hidden.remove(tag)

    def handle_data(self, data: str) -> None:
        if not self.hidden:
            self.parts.append(data)


def _without_markup(text: str) -> str:
    """Visible text of HTML."""
    parser = _Text()
    try:
        parser.feed(text)
        parser.close()
    except (AssertionError, ValueError):  # not HTML
        return text
    return "".join(parser.parts)


# ------------------------------------------------------------------------------------------------ replacement for ftfy

_LIGATURES = {
    "ﬀ": "ff",
    "ﬁ": "fi",
    "ﬂ": "fl",
    "ﬃ": "ffi",
    "ﬄ": "ffl",
    "ﬅ": "st",
    "ﬆ": "st",
    "ĳ": "ij",
    "ŉ": "'n",
    "ǆ": "dž",
    "ǉ": "lj",
    "ǌ": "nj",
    "ǳ": "dz",
}
_PLAIN = str.maketrans(
    {
        **_LIGATURES,
        **dict.fromkeys("\u02bc\u2018\u2019\u201a\u201b", "'"),
        **dict.fromkeys("\u201c\u201d\u201e\u201f", '"'),
        **dict.fromkeys("\r\u0085\u2028\u2029", "\n"),
        **{chr(c): unicodedata.normalize("NFKC", chr(c)) for c in (0x3000, *range(0xFF01, 0xFFEF))},
        **{chr(c): None for c in (*range(9), 0x0B, *range(0x0E, 0x20), 0x7F, *range(0x206A, 0x2070), 0xFEFF)},
        **{chr(c): None for c in range(0xFFF9, 0xFFFD)},
        **{chr(c): "\ufffd" for c in range(0xD800, 0xE000)},
    }
)
_TERMINAL = re.compile(r"\x1b\[(?:\d+(?:;\d+)*)?m")


def _plain(text: str) -> str:
    """The steps of ``ftfy.fix_text`` that do not guess an encoding."""
    if "<" not in text:
        text = html.unescape(text)
    text = _TERMINAL.sub("", text).replace("\r\n", "\n").translate(_PLAIN)
    return unicodedata.normalize("NFC", text)


def _fixer() -> Callable[[str], str]:
    """``ftfy.fix_text``, or :func:`_plain` if ftfy is not installed."""
    try:
        from ftfy import fix_text
    except ImportError:
        return _plain
    return fix_text
