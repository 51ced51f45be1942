"""Exceptions of the engine.

SpectrueError
├── InvalidRequestError   the client's fault, names the field     -> HTTP 400
├── EngineOverloadedError the queue is full, try again later      -> HTTP 429
├── EngineDeadError       a rank died or the loop stopped         -> HTTP 503
├── ConfigError           the operator's fault, names the setting -> refuses to start
└── ModelLoadError        a checkpoint that cannot be served      -> refuses to start
"""

from __future__ import annotations


class SpectrueError(Exception):
    """Base of everything that this package raises on purpose."""


class InvalidRequestError(SpectrueError):
    """A request that cannot be honoured; `param` is the field to blame, as the client spells it."""

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param

    def __reduce__(self) -> tuple[type, tuple[str, str | None]]:
        # Crosses process borders (Ray), where the default would lose `param`.
        return type(self), (self.message, self.param)


class EngineOverloadedError(SpectrueError):
    """The waiting queue is full. Nothing of the request was accepted."""


class EngineDeadError(SpectrueError):
    """The engine cannot run another step; the message says why, and which rank if known."""


class ConfigError(SpectrueError):
    """A setting, named in the message, that is unknown, out of range or contradicts another."""


class ModelLoadError(SpectrueError):
    """A checkpoint that is missing, incomplete or of a kind that is not supported."""
