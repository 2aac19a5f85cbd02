"""The one error type that users see: a sentence with what is wrong, where, and what to do."""

from __future__ import annotations


class SpecbuildError(Exception):
    """A wrong input, file, device or budget. The command line prints it and exits with 2."""


class EngineFileError(SpecbuildError):
    """The engine directory is not one, is damaged, or is of another format version."""


class OutdatedEngineError(EngineFileError):
    """Another version built the engine, or its files contradict each other: build it again.

    ``problem`` is the message without this advice, and ``command`` builds the engine.
    """

    def __init__(self, problem: str, command: str | None = None) -> None:
        super().__init__(problem, command)
        self.problem = problem
        self.command = command

    @classmethod
    def of(cls, where: object, error: Exception, command: str | None = None) -> OutdatedEngineError:
        """Return the error for a file or directory that another error is about."""
        problem = error.problem if isinstance(error, OutdatedEngineError) else error
        return cls(f"{where}: {problem}", command)

    def __str__(self) -> str:
        command = "" if self.command is None else f": {self.command}"
        return f"{self.problem}; build the engine again{command}"


class UnsupportedHereError(SpecbuildError):
    """The engine is sound, but this machine lacks what it needs."""


class RequestError(SpecbuildError):
    """A prompt or its parameters do not fit the engine; ``field`` is the parameter at fault."""

    def __init__(self, message: str, *, field: str | None = None) -> None:
        super().__init__(message)
        self.field = field
