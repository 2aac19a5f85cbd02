"""Log-probabilities of tokens and of the most likely alternatives, in OpenAI's forms."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from specbuild.runtime.generate_params import MAX_TOP_LOGPROBS
from specbuild.runtime.request import TokenEvent
from specbuild.runtime.serve.errors import invalid_value
from specbuild.runtime.serve.serving import Serving


def checked_top_logprobs(name: str, value: int | None) -> int:
    """Return the number of most likely tokens that a field requests. ApiError if out of range."""
    value = value or 0
    if not 0 <= value <= MAX_TOP_LOGPROBS:
        raise invalid_value(name, f"{name} is {value}, must be 0 to {MAX_TOP_LOGPROBS}")
    return value


def token_logprob(serving: Serving, token: TokenEvent) -> dict[str, Any]:
    """Return the entry of a token of a chat or a response."""
    top_logprobs = [_entry(serving, *pair) for pair in token.top_logprobs]
    return _entry(serving, token.token_id, _logprob(token)) | {"top_logprobs": top_logprobs}


def _logprob(token: TokenEvent) -> float:
    """Return the log-probability of a token. Its request must have set ``logprobs``."""
    assert token.logprob is not None
    return token.logprob


def _entry(serving: Serving, token_id: int, logprob: float) -> dict[str, Any]:
    text = serving.text_of([token_id])
    return {"token": text, "logprob": logprob, "bytes": list(text.encode())}


def completion_logprobs(
    serving: Serving, tokens: Sequence[TokenEvent], *, offset: int, with_top_logprobs: bool
) -> dict[str, Any]:
    """Return the log-probabilities of a completion's tokens, whose text starts at ``offset``.

    ``with_top_logprobs`` adds the most likely tokens at each position, and the chosen one if it is
    not among them.
    """
    texts = [serving.text_of([token.token_id]) for token in tokens]
    offsets = [offset + sum(map(len, texts[:i])) for i in range(len(texts))]
    top_logprobs = [
        _by_text(serving, text, token) for text, token in zip(texts, tokens, strict=True)
    ]
    return {
        "tokens": texts,
        "token_logprobs": [_logprob(token) for token in tokens],
        "text_offset": offsets,
        "top_logprobs": top_logprobs if with_top_logprobs else None,
    }


def _by_text(serving: Serving, text: str, token: TokenEvent) -> dict[str, float]:
    """Return log-probabilities by text. Of tokens with equal text the most likely one is kept."""
    logprobs: dict[str, float] = {}
    for token_id, logprob in token.top_logprobs:
        logprobs.setdefault(serving.text_of([token_id]), logprob)
    logprobs.setdefault(text, _logprob(token))
    return logprobs
