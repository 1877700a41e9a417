"""The exception for invalid user input, and helpers for its messages. Every package may import this module."""


class UserError(ValueError):
    """Invalid input. The message is one sentence: the field or file, what was found, and the remedy."""


def first_line(error: BaseException) -> str:
    """First line of an exception's message, at most 160 characters; its class name if the message is empty."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:160]
