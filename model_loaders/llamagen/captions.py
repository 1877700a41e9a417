"""Caption cleaning of LlamaGen's text-to-image models, applied to prompts as it was to the training captions.

The rules are those of DeepFloyd IF's caption cleaner, also used by PixArt and LlamaGen (arXiv 2406.06525): lower case;
no URLs, markup, nicknames, CJK characters, file names or long ids; one kind of dash and quote. As in training, they are
applied **twice**. In place of the package ftfy, which the original uses, ligatures and full-width letters become common
ones; text in a wrong encoding ("cafÃ©") stays.
"""

from __future__ import annotations

import html
import re
import unicodedata
from urllib.parse import unquote_plus

from ...errors import UserError

# Characters. The encoder reads 120 tokens, far fewer; some rules take seconds on a very long text.
LONGEST = 2000

_FILES = "(?:png|jpg|jpeg|bmp|webp|eps|pdf|apk|mp4)"
_SITE = r"[a-zA-Z0-9.\-]+[.](?:com|co|ru|net|org|edu|gov|it)[\w/-]*\b/?(?!@)"
_DASHES = (
    r"\-\u058a\u05be\u1400\u1806\u2010-\u2015\u2e17\u2e1a\u2e3a\u2e3b\u2e40"
    r"\u301c\u3030\u30a0\ufe31\ufe32\ufe58\ufe63\uff0d"
)

_FORMS: dict[int, str | None] = dict.fromkeys((*range(9), 0x0B, *range(0x0E, 0x20), 0x7F))  # control characters
_FORMS |= {c: unicodedata.normalize("NFKC", chr(c)) for c in (0x3000, *range(0xFF01, 0xFFEF), *range(0xFB00, 0xFB07))}
_MARKUP = re.compile(r"<(script|style|template)\b.*?</\1\s*>|<!--.*?-->|</?[a-z!?][^>]*>", re.DOTALL)


def _rules(*pairs: tuple[str, str]) -> list[tuple[re.Pattern[str], str]]:
    return [(re.compile(pattern), replacement) for pattern, replacement in pairs]


_ADDRESSES = _rules(
    ("<person>", "person"),
    # Two passes: removing an address may join the parts of another.
    (rf"\b(?:https?:(?:/{{1,3}}|[a-zA-Z0-9%])|{_SITE})", ""),
    (rf"\b(?:www:(?:/{{1,3}}|[a-zA-Z0-9%])|{_SITE})", ""),
)
_SIGNS = _rules(
    (r"&(\w+);", r"\1"),  # unknown references
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
_ENDS = _rules((r"^[\"']([\w\W]+)[\"']$", r"\1"), (r"^['_,\-:;]", ""), (r"['_,\-:+]$", ""), (r"^\.\S+$", ""))


def prompt_of(text: str, field: str) -> str:
    """A typed prompt as one line, before cleaning; nodes and command line check it here.

    Raises:
        UserError: it is empty, or nothing is left of it when it is cleaned.
    """
    prompt = " ".join(text.split())
    if not prompt:
        raise UserError(f"{field}: it is empty; describe the image in words.")
    if not clean(prompt):
        raise UserError(
            f"{field}: FastAR removes web addresses, file names and symbols, so nothing is left of this text; "
            "describe the image in words."
        )

    return prompt


def clean(caption: str) -> str:
    """A caption as one line of text for the text encoder, possibly empty.

    Characters beyond the first 2000 are ignored.
    """
    for _ in range(2):
        caption = _once(caption[:LONGEST])

    return caption


def _once(caption: str) -> str:
    """Apply all rules once."""
    caption = _apply(_ADDRESSES, unquote_plus(caption).strip().lower())
    caption = _apply(_SIGNS, html.unescape(_MARKUP.sub("", caption)))
    if caption.count("-") + caption.count("_") > 3:  # this-is-my-cute-cat
        caption = re.sub("[-_]", " ", caption)

    caption = unicodedata.normalize("NFC", caption.translate(_FORMS))
    caption = html.unescape(html.unescape(caption)).strip()
    return _apply(_ENDS, _apply(_SHOP, caption)).strip()


def _apply(rules: list[tuple[re.Pattern[str], str]], text: str) -> str:
    for pattern, replacement in rules:
        text = pattern.sub(replacement, text)

    return text
