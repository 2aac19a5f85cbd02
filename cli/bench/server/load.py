"""Load on a server: concurrent clients, or requests at a rate; and its report."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from specbuild.cli.bench.server.client import Client, Sample, body_of
from specbuild.cli.bench.server.report import LoadReport, spread

# Random prompts have these ids, which every vocabulary has after its bytes.
_IDS = range(300, 1000)


@dataclass(frozen=True, kw_only=True)
class LoadSettings:
    """The load. With ``rate`` None, ``clients`` run concurrently, each with one open request.

    With ``rate``, requests start at random (a Poisson process of ``rate`` per second), whatever the
    number of open ones. ``prompts`` are used in turn; without any, a prompt has ``prompt_tokens``
    random ids.
    """

    requests: int
    clients: int = 1
    rate: float | None = None
    prompts: tuple[str | tuple[int, ...], ...] = ()
    prompt_tokens: int = 128
    max_new_tokens: int = 128
    seed: int = 1


async def measure(
    url: str,
    settings: LoadSettings,
    *,
    model: str | None,
    key: str | None,
    timeout_s: float,
    done: Callable[[Sample], None],
) -> LoadReport:
    """Run a load; call ``done`` with each sample. SpecbuildError if the server does not respond."""
    client = Client(url, key=key, timeout_s=timeout_s)
    try:
        name = await client.model() if model is None else model
        bodies = [body_of(name, prompt, settings.max_new_tokens) for prompt in _prompts(settings)]
        # The first request of a process also pays for initialization.
        await client.complete(bodies[0])
        run = _closed if settings.rate is None else _open
        samples = await run(client, bodies, settings, done)
    finally:
        await client.close()
    return _report(url, name, settings, samples)


def _prompts(settings: LoadSettings) -> list[str | tuple[int, ...]]:
    if settings.prompts:
        return [settings.prompts[i % len(settings.prompts)] for i in range(settings.requests)]
    drawn = random.Random(settings.seed)
    return [tuple(drawn.choices(_IDS, k=settings.prompt_tokens)) for _ in range(settings.requests)]


async def _closed(
    client: Client,
    bodies: Sequence[dict[str, object]],
    settings: LoadSettings,
    done: Callable[[Sample], None],
) -> list[Sample]:
    remaining, samples = iter(bodies), []

    async def ask() -> None:
        for body in remaining:
            samples.append(await client.complete(body))
            done(samples[-1])

    await asyncio.gather(*(ask() for _ in range(min(settings.clients, len(bodies)))))
    return samples


async def _open(
    client: Client,
    bodies: Sequence[dict[str, object]],
    settings: LoadSettings,
    done: Callable[[Sample], None],
) -> list[Sample]:
    drawn, samples = random.Random(settings.seed), []
    assert settings.rate is not None

    async def ask(body: dict[str, object]) -> None:
        samples.append(await client.complete(body))
        done(samples[-1])

    async with asyncio.TaskGroup() as group:
        for body in bodies:
            group.create_task(ask(body))
            await asyncio.sleep(drawn.expovariate(settings.rate))
    return samples


def _report(url: str, model: str, settings: LoadSettings, samples: Sequence[Sample]) -> LoadReport:
    served = [sample for sample in samples if sample.error is None]
    duration_s = max(s.ended_s for s in samples) - min(s.started_s for s in samples)
    output = sum(sample.output_tokens for sample in served)
    errors = [sample.error for sample in samples if sample.error is not None]
    return LoadReport(
        server=url,
        model=model,
        requests=len(samples),
        clients=settings.clients if settings.rate is None else None,
        rate=settings.rate,
        duration_s=duration_s,
        errors=len(errors),
        first_error=errors[0] if errors else None,
        prompt_tokens=sum(sample.prompt_tokens for sample in served),
        output_tokens=output,
        output_tokens_per_s=output / duration_s,
        requests_per_s=len(served) / duration_s,
        ttft_s=spread([s.ttft_s for s in served if s.ttft_s is not None]),
        tpot_s=spread([s.tpot_s for s in served if s.tpot_s is not None]),
        gap_s=spread([gap for s in served for gap in s.gaps_s]),
        worst_gap_s=spread([max(s.gaps_s) for s in served if s.gaps_s]),
        e2e_s=spread([s.ended_s - s.started_s for s in served]),
    )
