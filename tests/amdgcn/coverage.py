"""Which instructions have a test of their own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

TESTED: set[str] = set()
F = TypeVar("F", bound=Callable[..., Any])


def covers(*mnemonics: str) -> Callable[[F], F]:
    """Marks a test function; filled when its module is imported."""
    TESTED.update(mnemonics)
    return lambda function: function
