"""The exception for invalid user input, and helpers for its messages. Every package may import this module."""

_LONGEST = 400


class UserError(ValueError):
    """Invalid input. The message is one sentence: the field or file, what was found, and the remedy.

    A value from a file or graph can make a message long or hold control characters: spaces replace these, and a message over 400
    characters is shortened in the middle.
    """

    # The name in ComfyUI's reports: without a machine's path, and how web/js/errors.js recognises the exception.
    __module__ = "fastar"

    def __init__(self, message: str):
        message = "".join(c if c.isprintable() else " " for c in message)
        if len(message) > _LONGEST:
            message = f"{message[: _LONGEST - 163]}...{message[-160:]}"
        super().__init__(message)


def first_line(error: BaseException) -> str:
    """First line of an exception's message, at most 160 characters; its class name if the message is empty."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:160]
