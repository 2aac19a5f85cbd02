"""What every answer says of its tokens, its end and itself."""

from __future__ import annotations

import time
import uuid
from collections.abc import Mapping
from typing import Any

from specbuild.runtime.records import FinishReason

# OpenAI's words for the ends of outputs. One that was aborted ends where its client left, or where
# the server found a stop string. What is late is an error.
FINISH_REASONS: Mapping[FinishReason, str] = {
    "eos": "stop",
    "stop": "stop",
    "length": "length",
    "abort": "stop",
}


def usage(prompt: int, output: int, *, cached: int, reasoning: int | None = None) -> dict[str, Any]:
    """Numbers of tokens; ``cached`` are of the prompt, ``reasoning`` None leaves it out."""
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
    """The fields that begin an answer, and each chunk of a stream."""
    response_id = f"{prefix}-{request_id or uuid.uuid4().hex}"
    return {"id": response_id, "object": object_type, "created": int(time.time()), "model": model}
