"""Errors that clients get, as OpenAI's error object."""

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


# Messages quote values of the client, which may be megabytes long.
MAX_MESSAGE_LENGTH = 1000


def _shortened(text: str) -> str:
    half = MAX_MESSAGE_LENGTH // 2
    return text if len(text) <= MAX_MESSAGE_LENGTH else f"{text[:half]} … {text[-half:]}"


class ApiError(Exception):
    """An HTTP error: its status, a message, and the name of the invalid field (``param``)."""

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
        """The JSON object that OpenAI's clients expect."""
        error_type = _TYPES.get(self.status, "invalid_request_error")
        error = {
            "message": self.message,
            "type": error_type,
            "param": self.param,
            "code": self.code,
        }
        return {"error": error}


def engine_error(error: RequestError, param: str | None = None) -> ApiError:
    """Return the ApiError for a request that the engine rejects. ``param`` is used if the error
    names no field.
    """
    message = str(error)
    code = "context_length_exceeded" if "max_seq_len" in message else None
    return ApiError(400, message, param=error.field or param, code=code)


def invalid_value(param: str, message: str) -> ApiError:
    """Return the ApiError for a field with an invalid value."""
    return ApiError(400, message, param=param, code="invalid_value")


def unsupported(param: str, advice: str) -> ApiError:
    """Return the ApiError for an unsupported field; ``advice`` says what to do instead."""
    return ApiError(
        400, f"{param} is not supported: {advice}", param=param, code="unsupported_parameter"
    )
