"""The exception for invalid user input, and helpers for its messages. Every package may import this module."""

from collections.abc import Iterable
from difflib import get_close_matches
from importlib.util import find_spec
from typing import TYPE_CHECKING, ClassVar, NoReturn

_LONGEST = 400
# Packages that every entry point needs, by the names under which they are imported and installed.
_NEEDED = {
    "torch": "torch",
    "numpy": "numpy",
    "PIL": "pillow",
    "safetensors": "safetensors",
    "huggingface_hub": "huggingface-hub",
    "tqdm": "tqdm",
}


class UserError(ValueError):
    """Invalid input. The message is one sentence: the field or file, what was found, and the remedy.

    A value from a file or graph can make a message long or hold control characters: spaces replace these, and a message
    over 400 characters is shortened in the middle.
    """

    # The name in ComfyUI's reports: without a machine's path, and how web/js/errors.js recognises the exception.
    __module__ = "fastar"

    def __init__(self, message: str):
        message = "".join(c if c.isprintable() else " " for c in message)

        if len(message) > _LONGEST:
            message = f"{message[: _LONGEST - 163]}...{message[-160:]}"

        super().__init__(message)


class NotOfImages(UserError, AttributeError):
    """What asks an autoencoder for an attribute that those of images lack: a node for sounds, videos or meshes.

    It is an AttributeError, so that ``hasattr`` and ``getattr`` with a default answer as always.
    """

    __module__ = "fastar"
    __qualname__ = "UserError"  # as which ComfyUI reports it

    def __init__(self, attribute: str):
        super().__init__(
            f"vae: this node needs {attribute!r}, which a VAE of FastAR does not have, because it is for single images "
            "only; connect a different VAE."
        )


class NotReadHere(UserError, AttributeError, TypeError):
    """What a node of others asks of a value of ours, which a switch without types has connected to it.

    It is an AttributeError and a TypeError, so that ``hasattr`` and a trial of ``iter`` answer as always.

    Args:
        kind: of the value, see docs/sockets.md; "vae" for a VAE.
        asked: what the node asked for.
    """

    __module__ = "fastar"
    __qualname__ = "UserError"  # as which ComfyUI reports it

    def __init__(self, kind: str, asked: str):
        field = kind if kind in ("model", "vae", "report", "cache", "crop") else "condition"
        reader = "a FastAR node that reads it"
        if field in ("model", "condition"):
            reader = "a sampler of FastAR"
        if field == "vae":
            reader = "VAE Decode or VAE Encode"
        super().__init__(
            f"{field}: this node cannot read a {field} of FastAR (the node asks for {asked}); connect the {field} to "
            f"{reader} instead."
        )


class OfFastAR:
    """A value that FastAR's nodes read: other nodes end in a sentence with it."""

    kind: ClassVar[str]

    if not TYPE_CHECKING:  # type checkers know which attributes there are

        def __getattr__(self, name: str) -> NoReturn:
            if name.startswith("__"):  # Python and its libraries look for these
                raise AttributeError(name)
            raise NotReadHere(self.kind, name)

        # What lists (a CONDITIONING), dictionaries (a LATENT) and tensors (an IMAGE) can do.

        def __iter__(self) -> NoReturn:
            raise NotReadHere(self.kind, "the entries of a list or a dictionary")

        def __getitem__(self, place: object) -> NoReturn:
            raise NotReadHere(self.kind, "the entries of a list or a dictionary")

        def __add__(self, other: object) -> NoReturn:
            raise NotReadHere(self.kind, "the numbers of a tensor")

        __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __add__


def not_finite(field: str, maker: str, made: str) -> UserError:
    """The error for values that are NaN or infinite; nodes, command line and Python raise the same one.

    Args:
        field: the input to change: "model", "draft" or "decoder", for example.
        maker: name of the network's file.
        made: what it computed: "latents", "logits", "pixels" or "features".
    """
    return UserError(
        f"{field}: {maker} computed {made} that are not finite (NaN or infinity). Possible causes: fp16 overflowed, "
        "the file is damaged, or its training run diverged. Choose the dtype bf16 or fp32, or a different file."
    )


def first_line(error: BaseException) -> str:
    """First line of an exception's message, at most 160 characters; its class name if the message is empty."""
    lines = str(error).strip().splitlines()
    if not lines:
        return type(error).__name__[:160]

    return lines[0][:160]


def did_you_mean(word: str, choices: Iterable[str]) -> str:
    """ "did you mean X?" with the choice that is spelt most like a word, ignoring case; "" if none is similar."""
    by_key = {choice.lower(): choice for choice in choices}
    close = get_close_matches(word[:_LONGEST].lower(), by_key, 1)
    if not close:
        return ""

    return f"did you mean {by_key[close[0]]}?"


def unknown(field: str, problem: str, name: object, choices: Iterable[str]) -> UserError:
    """The error for a name that is none of the choices: it suggests the closest one, and lists all.

    Args:
        field: the input that holds the name.
        problem: what is wrong, "there is no preset 'quick'" for example.
        name: the name that was given.
        choices: the names that exist.
    """
    names = list(choices)
    listed = ", ".join(names)
    hint = did_you_mean(str(name), names)

    if hint:
        return UserError(f"{field}: {problem}; {hint} Choose one of {listed}.")
    return UserError(f"{field}: {problem}; choose one of {listed}.")


def missing_packages() -> str:
    """A sentence that names the packages that are not installed, with the command that installs them; "" if all are.

    ComfyUI brings all of them, so that installing FastAR installs none: pip would replace torch by another build.
    """
    missing = [package for module, package in _NEEDED.items() if find_spec(module) is None]
    if not missing:
        return ""

    names = " ".join(missing)
    return f"FastAR needs Python packages that are not installed; run: python -m pip install {names}."


# Characters of a cell, a label or a name that are shown.
LONGEST = 200


def printable(text: str, most: int = LONGEST) -> str:
    """A text on one line: control characters become spaces; a text over ``most`` characters is shortened."""
    characters = [c if c.isprintable() else " " for c in text[: most + 1]]
    text = "".join(characters).strip()

    if len(text) > most:
        return f"{text[: most - 3]}..."
    return text


def amount(number: int, units: str) -> str:
    """A number of things that are named in the plural: "1 pass", "1,024 passes"."""
    one = units.removesuffix("es" if units.endswith("sses") else "s")
    return f"{number:,} {one if number == 1 else units}"
