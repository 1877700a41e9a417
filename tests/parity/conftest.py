"""Fixtures of the tests of recorded results."""

from command_line import lab, sentence  # noqa: F401
