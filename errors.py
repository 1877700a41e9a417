"""The one exception whose message is meant for a person. Every room may import this module; it imports nothing."""


class UserError(ValueError):
    """Bad input, told in one sentence: which field or file, what was found, what to do."""
