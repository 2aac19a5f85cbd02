"""Converts requests and responses of NVIDIA Dynamo's frontend: ids in, ids out.

The frontend tokenizes prompts and detokenizes responses. It also searches stop strings, and cancels
the request when it finds one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from specbuild.runtime.engine_dir.generation_defaults import GenerationDefaults
from specbuild.runtime.errors import RequestError
from specbuild.runtime.records import FinishReason
from specbuild.runtime.request import Event, FinishEvent, GenerateParams, TokenEvent
from specbuild.runtime.sampling import served_sampling

# The frontend's names of finish reasons.
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
    """Return the parameters of a request with up to ``longest`` tokens after its prompt.

    ``defaults`` are the model's, for parameters that the request does not set.

    Raises RequestError for an unsupported or invalid value.
    """
    defaults = defaults or GenerationDefaults()
    sampling = _group(request, "sampling_options")
    stopping = _group(request, "stop_conditions")
    logprobs = _group(request, "output_options").get("logprobs")
    if sampling.get("guided_decoding"):
        raise RequestError("structured output is not supported with Dynamo: use specbuild serve")
    if (sampling.get("n") or 1) != 1:
        raise RequestError("n must be 1 with Dynamo: send one request per choice")
    max_tokens = stopping.get("max_tokens")
    return GenerateParams(
        max_new_tokens=defaults.max_new_tokens or max(1, longest)
        if max_tokens is None
        else max_tokens,
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
    """Return a turn's tokens for a request; the last ones have finish reason and usage."""
    tokens = [event for event in events if isinstance(event, TokenEvent)]
    chunk: dict[str, Any] = {"token_ids": [event.token_id for event in tokens], "index": 0}
    if logprobs and tokens:
        chunk["log_probs"] = [event.logprob for event in tokens]
        chunk["top_logprobs"] = [_likeliest(event) for event in tokens]
    ended = next((event for event in events if isinstance(event, FinishEvent)), None)
    if ended is not None:
        output_tokens = ended.record.stats.output_tokens
        chunk["finish_reason"] = _REASONS[ended.record.finish_reason]
        chunk["completion_usage"] = {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": output_tokens,
            "total_tokens": prompt_tokens + output_tokens,
        }
    return chunk


def _group(request: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """Return a group of fields, which may be absent or null."""
    fields = request.get(name) or {}
    if not isinstance(fields, Mapping):
        raise RequestError(f"{name} is {fields!r}, must be an object")
    return fields


def _likeliest(event: TokenEvent) -> list[dict[str, Any]]:
    """Return the alternatives at a token, likeliest first; by default the token itself."""
    alternatives = event.top_logprobs or ((event.token_id, event.logprob),)
    return [
        {"rank": rank, "token_id": token, "token": None, "logprob": logprob}
        for rank, (token, logprob) in enumerate(alternatives, start=1)
    ]
