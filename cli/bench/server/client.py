"""One streamed request to a server with OpenAI's API, and the times of its tokens."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from time import perf_counter
from typing import Any

import httpx

from specbuild.runtime.errors import SpecbuildError

CONNECT_TIMEOUT_S = 10.0


@dataclass(frozen=True)
class Sample:
    """The result of a request; times are in seconds, gaps are between deliveries to the client.

    ``error`` is None for a completed request.
    """

    started_s: float
    ended_s: float
    ttft_s: float | None = None
    gaps_s: tuple[float, ...] = ()
    prompt_tokens: int = 0
    output_tokens: int = 0
    error: str | None = None

    @property
    def tpot_s(self) -> float | None:
        """The seconds per token after the first one."""
        if self.ttft_s is None or self.output_tokens < 2:
            return None
        return (self.ended_s - self.started_s - self.ttft_s) / (self.output_tokens - 1)


class Client:
    """A client of a server. ``url`` is its address, with or without ``/v1``."""

    def __init__(self, url: str, *, key: str | None, timeout_s: float) -> None:
        base = url.rstrip("/").removesuffix("/v1")
        headers = {} if key is None else {"Authorization": f"Bearer {key}"}
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
        timeout = httpx.Timeout(timeout_s, connect=CONNECT_TIMEOUT_S)
        self._http = httpx.AsyncClient(
            base_url=base, headers=headers, limits=limits, timeout=timeout
        )

    async def close(self) -> None:
        """Close all connections."""
        await self._http.aclose()

    async def model(self) -> str:
        """Return the server's first model. SpecbuildError if the server does not respond."""
        try:
            answer = await self._http.get("/v1/models")
            answer.raise_for_status()
            return str(answer.json()["data"][0]["id"])
        except (httpx.HTTPError, ValueError, LookupError, TypeError) as error:
            raise SpecbuildError(
                f"{self._http.base_url} names no model at /v1/models: {error}"
            ) from error

    async def complete(self, body: dict[str, Any]) -> Sample:
        """Stream a completion to its end."""
        body = {**body, "stream": True, "stream_options": {"include_usage": True}}
        started_s = perf_counter()
        times: list[float] = []
        usage: dict[str, Any] = {}
        try:
            async with self._http.stream("POST", "/v1/completions", json=body) as answer:
                if answer.status_code != 200:
                    reason = (await answer.aread()).decode(errors="replace")[:200]
                    return Sample(
                        started_s, perf_counter(), error=f"{answer.status_code}: {reason}"
                    )
                async for line in answer.aiter_lines():
                    chunk = _chunk(line)
                    if chunk is None:
                        continue
                    if chunk.get("error"):
                        return Sample(started_s, perf_counter(), error=str(chunk["error"]))
                    usage = chunk.get("usage") or usage
                    if chunk.get("choices"):
                        times.append(perf_counter())
        except httpx.HTTPError as error:
            return Sample(started_s, perf_counter(), error=f"{type(error).__name__}: {error}")
        if not times:
            return Sample(started_s, perf_counter(), error="the stream had no tokens")
        return Sample(
            started_s,
            times[-1],
            ttft_s=times[0] - started_s,
            gaps_s=tuple(after - before for before, after in pairwise(times)),
            prompt_tokens=int(usage.get("prompt_tokens", 0)),
            output_tokens=int(usage.get("completion_tokens", len(times))),
        )


def _chunk(line: str) -> dict[str, Any] | None:
    data = line.removeprefix("data:").strip()
    if not line.startswith("data:") or data == "[DONE]":
        return None
    chunk: Any = json.loads(data)
    return chunk if isinstance(chunk, dict) else None


def body_of(model: str, prompt: str | Sequence[int], tokens: int) -> dict[str, Any]:
    """Return a greedy completion of exactly this many tokens, if the server supports it."""
    return {
        "model": model,
        "prompt": prompt if isinstance(prompt, str) else list(prompt),
        "max_tokens": tokens,
        "temperature": 0,
        "ignore_eos": True,
    }
