"""The one error type that users see: a sentence with what is wrong, where, and what to do."""

from __future__ import annotations


class SpecbuildError(Exception):
    """A wrong input, file, device or budget. The command line prints it and exits with 2."""


class EngineFileError(SpecbuildError):
    """The engine directory is not one, is damaged, or is of another format version."""


class UnsupportedHereError(SpecbuildError):
    """The engine is sound, but this machine lacks what it needs."""


class RequestError(SpecbuildError):
    """A prompt or its parameters do not fit the engine; ``field`` is the parameter at fault."""

    def __init__(self, message: str, *, field: str | None = None) -> None:
        super().__init__(message)
        self.field = field
