"""Token counts, finish reasons and common fields of answers."""

from __future__ import annotations

import time
import uuid
from collections.abc import Mapping
from typing import Any

from specbuild.runtime.records import FinishReason

# OpenAI's finish reasons. The server aborts an output after a stop string, so "abort" becomes
# "stop". Timeouts are errors and have no finish reason.
FINISH_REASONS: Mapping[FinishReason, str] = {
    "eos": "stop",
    "stop": "stop",
    "length": "length",
    "abort": "stop",
}


def usage(prompt: int, output: int, *, cached: int, reasoning: int | None = None) -> dict[str, Any]:
    """Return the token counts. ``cached`` is the number of prompt tokens from the cache.

    Reasoning tokens are omitted if ``reasoning`` is None.
    """
    counts: dict[str, Any] = {
        "prompt_tokens": prompt,
        "completion_tokens": output,
        "total_tokens": prompt + output,
        "prompt_tokens_details": {"cached_tokens": cached},
    }
    if reasoning is not None:
        counts["completion_tokens_details"] = {"reasoning_tokens": reasoning}
    return counts


def response_head(
    prefix: str, object_type: str, model: str, request_id: str | None
) -> dict[str, Any]:
    """Return the first fields of an answer and of each chunk of a stream."""
    response_id = f"{prefix}-{request_id or uuid.uuid4().hex}"
    return {"id": response_id, "object": object_type, "created": int(time.time()), "model": model}
