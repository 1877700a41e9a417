"""Notations of prompts that no model here reads: weights, LoRAs, embeddings, wildcards and BREAK."""

from __future__ import annotations

import re
from collections.abc import Sequence

from ..errors import printable
from ..networks.chat import MOST_TEXT

_BRACKETS = re.compile(r"\([^()\[\]]*\)|\[[^()\[\]]*\]")
# A fraction after a text, "(red:1.2)" or "[cat:dog:0.5]", or a digit that belongs to no time or ratio: "(red:2)".
_WEIGHT = re.compile(r"[\W\d]*[^\W\d].*:\s*[-+]?\d*\.\d+\s*[)\]]|.*[^\s\d]\s*:[-+]?\d\s*[)\]]", re.DOTALL)
_OTHERS = re.compile(
    "|".join(
        [
            r"(?i:<(?:lora|lyco|hypernet):[^<>]*>)",
            r"(?<!\w)embedding:[^\s,()]+",
            r"(?<!\w)__[^\W_](?:[\w./*-]*[^\W_])?__(?!\w)",  # a wildcard
            r"(?<=\S)\s+BREAK\b(?=\W*\w)",
        ]
    )
)
# A BREAK that is a text in the image: beside other words in capitals, or in quotes.
_SHOWN_BREAK = re.compile(r"[A-Z]{2,}\W?\s+BREAK\b|\bBREAK\s+[A-Z]{2,}\b|[\"'“‘]\s*BREAK|BREAK\W?\s*[\"'”’]")
# How many notations a remark names, and with how many characters each.
_MOST = 3
_LONGEST = 40


def read_as_text(prompts: Sequence[str]) -> str:
    """A remark on the notations in prompts that are read as plain text; "" if there are none."""
    found: dict[str, None] = {}  # in the order of the texts
    for prompt in dict.fromkeys(prompts):
        found |= dict.fromkeys(_notations(prompt[:MOST_TEXT]))

    if not found:
        return ""

    named = ", ".join(printable(text, _LONGEST) for text in [*found][:_MOST])
    more = f" and {len(found) - _MOST} more" if len(found) > _MOST else ""
    return (
        f"The model reads {named}{more} as plain text, because its prompts have no weights, LoRAs, embeddings, "
        "wildcards or BREAK; describe the image in words alone."
    )


def _notations(prompt: str) -> list[str]:
    """The notations in a prompt."""
    weighted = [text for text in _BRACKETS.findall(prompt) if _WEIGHT.fullmatch(text)]

    # "(embedding:name:1.2)" is one.
    rest = _BRACKETS.sub(lambda match: " , " if match.group() in weighted else match.group(), prompt)
    others = [text.strip() for text in _OTHERS.findall(rest)]
    return [*weighted, *(text for text in others if text != "BREAK" or not _SHOWN_BREAK.search(prompt))]
