"""Prompts of language models as token ids: Qwen's chat template, and the checks of every prompt."""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence

from ..errors import UserError

# Most characters of a prompt, or of a list of labels. The more there are, the more time and memory encoding takes, and
# encoding cannot be interrupted.
MOST_TEXT = 20_000


def expect_text(text: str, field: str = "text") -> None:
    """Raise a UserError if a prompt has too many characters to be encoded."""
    if len(text) > MOST_TEXT:
        raise UserError(f"{field}: it has {len(text)} characters; give at most {MOST_TEXT}.")


def chat(turns: Sequence[str], encode: Callable[[str], list[int]], tokens: tuple[int, int]) -> list[int]:
    """Token ids of turns, and of the beginning of the assistant's turn. ``tokens``: ids that begin and end a turn."""
    begin, end = tokens

    ids: list[int] = []
    for turn in turns:
        ids += [begin, *encode(turn), end, *encode("\n")]

    return [*ids, begin, *encode("assistant\n")]


def without_special(ids: list[int], special: Sequence[Container[int]], name: str, field: str = "text") -> list[int]:
    """The ids of a text for the model ``name``; a UserError if one of them is a special token."""
    for reserved in special:
        if any(i in reserved for i in ids):
            raise UserError(f"{field}: the text contains a special token of {name}; write the text in a different way.")

    return ids


def checked(ids: list[int], vocab: int, most: int, name: str, field: str = "text") -> list[int]:
    """The ids of a prompt for the model ``name``, after two checks: the ids are in its vocabulary of ``vocab`` tokens,
    and there are at most ``most`` ids.
    """
    wrong = [i for i in ids if not 0 <= i < vocab]
    if wrong:
        raise UserError(
            f"{field}: the tokenizer gives token {wrong[0]}, but {name} has only {vocab} tokens; use the tokenizer of "
            "the model."
        )
    if len(ids) > most:
        raise UserError(
            f"{field}: the prompt has {len(ids)} tokens including its template, but {name} reads at most "
            f"{max(0, most)}; shorten the prompt."
        )

    return ids
