"""Compares the predictions of ``specbuild estimate`` with measurements of ``bench server``.

The costs of a CPU engine are measured directly before and after each load of a server, and
averaged, since a shared machine changes. Those of a CUDA engine are from ``tune`` and ``--costs``.
Both have the same arrivals. The time of a request outside of the engine (``estimate --request-ms``)
is the difference of the TTFT of a single client to its estimate. The server caches no prefixes.
Needs the extra ``serve``. Writes JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

from server_process import server_process

from specbuild.builder.progress import SilentProgress
from specbuild.cli.bench.server.load import LoadSettings, measure
from specbuild.cli.bench.server.report import LoadReport
from specbuild.cli.estimate.costs import costs_for, with_draft
from specbuild.cli.estimate.options import CostOptions
from specbuild.cli.estimate.report import spreads
from specbuild.runtime.engine import Engine
from specbuild.runtime.engine_dir.files import read_manifest
from specbuild.runtime.engine_dir.manifest import Manifest
from specbuild.runtime.measure.serving.costs import ServingCosts
from specbuild.runtime.measure.serving.host_measurement import measure_host_costs
from specbuild.runtime.measure.serving.simulation import Traffic, simulate

FIGURES = ("ttft_s", "tpot_s", "e2e_s")
# Requests of one client, which determine the server's own time.
ALONE = 12
_TIMEOUT_S = 600.0


def between(before: ServingCosts, after: ServingCosts) -> ServingCosts:
    """Return the means of two measurements of the same launches."""
    steps = [
        replace(one, step_s=means(one.step_s, other.step_s))
        for one, other in zip(before.steps, after.steps, strict=True)
    ]
    return replace(before, prompt_s=means(before.prompt_s, after.prompt_s), steps=tuple(steps))


def means(first: Sequence[float], second: Sequence[float]) -> tuple[float, ...]:
    """Return the means pair by pair."""
    return tuple((a + b) / 2 for a, b in zip(first, second, strict=True))


def predicted(manifest: Manifest, costs: ServingCosts, traffic: Traffic) -> dict[str, float]:
    """Return means in seconds, by figure, and tokens per second."""
    result = simulate(manifest, with_draft(costs, drafted=False), traffic)
    means = [spread.mean for spread in spreads(result) if spread is not None]
    tokens = sum(served.tokens for served in result.served)
    return dict(zip(FIGURES, means, strict=True)) | {"tokens_per_s": tokens / result.duration_s}


def measured(report: LoadReport) -> dict[str, float]:
    """Return the same for a server's clients."""
    result = {name: getattr(report, name).mean for name in FIGURES}
    return result | {"tokens_per_s": report.output_tokens_per_s}


def loaded(url: str, traffic: Traffic) -> LoadReport:
    """Return what clients of a server see under this traffic."""
    settings = LoadSettings(
        requests=traffic.requests,
        clients=traffic.clients,
        rate=traffic.rate,
        prompt_tokens=traffic.prompt_tokens,
        max_new_tokens=traffic.output_tokens,
    )
    run = measure(url, settings, model=None, key=None, timeout_s=_TIMEOUT_S, done=lambda _: None)
    return asyncio.run(run)


def costs_of(
    path: Path, file: Path | None, contexts: tuple[int, int]
) -> Callable[[], ServingCosts]:
    """Return a function that measures a CPU engine's costs, or returns those of a file."""
    if file is not None:
        args = CostOptions(costs=file)
        result = costs_for(path, read_manifest(path), args, contexts, SilentProgress())
        return lambda: result
    engine = Engine.load(path)
    return lambda: measure_host_costs(engine, "cpu", contexts, drafted=False, done=lambda: None)


def main() -> None:
    """Print rounds, and write them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("engine", type=Path)
    parser.add_argument("--rates", default="1,3")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--requests", type=int, default=24)
    parser.add_argument("--prompt-tokens", type=int, default=128)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--costs", type=Path, help="bench sweep ENGINE prefill --json, on CUDA")
    parser.add_argument("--output", type=Path, required=True)
    inputs = parser.parse_args()
    manifest = read_manifest(inputs.engine)
    contexts = (inputs.prompt_tokens, inputs.prompt_tokens + inputs.tokens // 2)
    rounds: list[dict[str, Any]] = []
    measure_costs = costs_of(inputs.engine, inputs.costs, contexts)
    with server_process(inputs.engine, "--no-spec", "--no-prefix-cache") as (_, url):
        before = measure_costs()
        alone = Traffic(
            requests=ALONE, prompt_tokens=inputs.prompt_tokens, output_tokens=inputs.tokens
        )
        seen = measured(loaded(url, alone))
        after = measure_costs()
        message = predicted(manifest, between(before, after), alone)
        request_s, before = max(0.0, seen["ttft_s"] - message["ttft_s"]), after
        print(f"a request takes {1e3 * request_s:.1f} ms outside of the engine", flush=True)
        for _ in range(inputs.rounds):
            for rate in map(float, inputs.rates.split(",")):
                traffic = Traffic(
                    requests=inputs.requests,
                    prompt_tokens=inputs.prompt_tokens,
                    output_tokens=inputs.tokens,
                    rate=rate,
                    request_s=request_s,
                )
                seen = measured(loaded(url, traffic))
                after = measure_costs()
                message = predicted(manifest, between(before, after), traffic)
                before = after
                ratios = {name: message[name] / seen[name] for name in seen}
                rounds.append(
                    {"rate": rate, "measured": seen, "predicted": message, "ratio": ratios}
                )
                print(rate, {name: round(ratio, 3) for name, ratio in ratios.items()}, flush=True)
    rates = dict.fromkeys(entry["rate"] for entry in rounds)
    summary = {
        str(rate): {
            name: median(entry["ratio"][name] for entry in rounds if entry["rate"] == rate)
            for name in (*FIGURES, "tokens_per_s")
        }
        for rate in rates
    }
    result = {"request_s": request_s, "median_ratio": summary, "rounds": rounds}
    inputs.output.write_text(json.dumps(result, indent=1))
    print(json.dumps(summary))


if __name__ == "__main__":
    main()
