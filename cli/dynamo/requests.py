"""Requests of NVIDIA Dynamo's front end, and what answers them: ids in, ids out.

The front end has tokenised the prompt, and makes text of what comes back; it looks for stop strings
there, and leaves the request once it has found one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from specbuild.runtime.engine_dir.generation_defaults import GenerationDefaults
from specbuild.runtime.errors import RequestError
from specbuild.runtime.records import FinishReason
from specbuild.runtime.request import Event, FinishEvent, GenerateParams, TokenEvent
from specbuild.runtime.sampling import served_sampling

# How the front end calls what ended a request.
_REASONS: Mapping[FinishReason, str] = {
    "length": "length",
    "eos": "stop",
    "stop": "stop",
    "abort": "cancelled",
    "deadline": "cancelled",
    "guide_failed": "error",
}


def params_of(
    request: Mapping[str, Any], *, longest: int, defaults: GenerationDefaults | None = None
) -> GenerateParams:
    """What a request asks of a sequence that may have ``longest`` tokens behind its prompt.

    ``defaults`` are the model's where the request states nothing.

    Raises RequestError where it asks for what an engine does not do, or a value is none.
    """
    defaults = defaults or GenerationDefaults()
    sampling = _given(request, "sampling_options")
    stopping = _given(request, "stop_conditions")
    logprobs = _given(request, "output_options").get("logprobs")
    if sampling.get("guided_decoding"):
        raise RequestError("structured output is not supported with Dynamo: use specbuild serve")
    if (sampling.get("n") or 1) != 1:
        raise RequestError("n must be 1 with Dynamo: send one request per choice")
    most = stopping.get("max_tokens")
    return GenerateParams(
        max_new_tokens=defaults.max_new_tokens or max(1, longest) if most is None else most,
        sampling=served_sampling(sampling, defaults.sampling),
        stop_token_ids=tuple(
            token
            for name in ("stop_token_ids", "stop_token_ids_hidden")
            for token in stopping.get(name) or ()
        ),
        ignore_eos=bool(stopping.get("ignore_eos")),
        min_tokens=stopping.get("min_tokens") or 0,
        top_logprobs=logprobs or 0,
        raw=True,
        detokenize=False,
    )


def chunk_of(events: Sequence[Event], *, prompt_tokens: int, logprobs: bool) -> dict[str, Any]:
    """What a turn gave a request: ids, and with the last ones why it ended and how many."""
    tokens = [event for event in events if isinstance(event, TokenEvent)]
    chunk: dict[str, Any] = {"token_ids": [event.token_id for event in tokens], "index": 0}
    if logprobs and tokens:
        chunk["log_probs"] = [event.logprob for event in tokens]
        chunk["top_logprobs"] = [_likeliest(event) for event in tokens]
    ended = next((event for event in events if isinstance(event, FinishEvent)), None)
    if ended is not None:
        made = ended.record.stats.output_tokens
        chunk["finish_reason"] = _REASONS[ended.record.finish_reason]
        chunk["completion_usage"] = {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": made,
            "total_tokens": prompt_tokens + made,
        }
    return chunk


def _given(request: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """A group of fields, which may be absent or null."""
    found = request.get(name) or {}
    if not isinstance(found, Mapping):
        raise RequestError(f"{name} is {found!r}, must be an object")
    return found


def _likeliest(event: TokenEvent) -> list[dict[str, Any]]:
    """The alternatives at a token, the likeliest first; the token itself where none were asked."""
    known = event.top_logprobs or ((event.token_id, event.logprob),)
    return [
        {"rank": rank, "token_id": token, "token": None, "logprob": logprob}
        for rank, (token, logprob) in enumerate(known, start=1)
    ]
