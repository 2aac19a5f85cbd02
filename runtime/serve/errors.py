"""What a client is told when a request cannot be served: OpenAI's error object."""

from __future__ import annotations

from typing import Any

from specbuild.runtime.errors import RequestError

_TYPES = {
    401: "authentication_error",
    404: "not_found_error",
    429: "rate_limit_error",
    500: "server_error",
    503: "server_error",
    504: "timeout_error",
}


# Errors repeat what the client sent, which may be megabytes.
MAX_MESSAGE_LENGTH = 1000


def _shortened(text: str) -> str:
    half = MAX_MESSAGE_LENGTH // 2
    return text if len(text) <= MAX_MESSAGE_LENGTH else f"{text[:half]} … {text[-half:]}"


class ApiError(Exception):
    """A request that is refused: HTTP status, one sentence, and the field that is wrong."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = _shortened(message)
        self.param = None if param is None else _shortened(param)
        self.code = code
        self.headers = headers or {}

    @property
    def body(self) -> dict[str, Any]:
        """The object that OpenAI's clients read."""
        error_type = _TYPES.get(self.status, "invalid_request_error")
        error = {
            "message": self.message,
            "type": error_type,
            "param": self.param,
            "code": self.code,
        }
        return {"error": error}


def engine_error(error: RequestError, param: str | None = None) -> ApiError:
    """What the engine does not serve; the field is the error's own, or ``param``."""
    message = str(error)
    code = "context_length_exceeded" if "max_seq_len" in message else None
    return ApiError(400, message, param=error.field or param, code=code)


def invalid_value(param: str, message: str) -> ApiError:
    """A field that has a wrong value."""
    return ApiError(400, message, param=param, code="invalid_value")


def unsupported(param: str, advice: str) -> ApiError:
    """A field of OpenAI's that this server does not have; ``instead`` says what to do."""
    return ApiError(
        400, f"{param} is not offered: {advice}", param=param, code="unsupported_parameter"
    )
