"""What the interpreter raises: it never guesses."""

from __future__ import annotations


class Fault(Exception):
    """The program did something that hardware would answer with a fault, a hang or garbage."""


class Unsupported(Fault):
    """An instruction, operand form or modifier that the interpreter does not implement."""
