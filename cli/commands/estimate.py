"""``specbuild estimate``: predict the latencies of a server and the number of replicas."""

from __future__ import annotations

from specbuild.cli.estimate.options import CostOptions, TargetOptions, TrafficOptions
from specbuild.cli.options.derived import takes_options
from specbuild.cli.options.shared import Debug, EngineDirectory, Json


@takes_options
def estimate(
    engine: EngineDirectory,
    *,
    traffic: TrafficOptions,
    costs: CostOptions,
    targets: TargetOptions,
    as_json: Json = False,
    _debug: Debug = False,
) -> None:
    """Predict TTFT, TPOT and the number of replicas for a target, without a server.

    The engine's scheduler runs with measured step times instead of real steps, so
    chunked prefill, batching and waiting for pages behave as in a server. Step
    times of a CPU engine are measured first, for some seconds. A CUDA engine needs
    no GPU: its step times come from [b]tune[/b], and its prefill times from
    [b]bench sweep ENGINE prefill --json[/b].

    \b
    Examples:
    specbuild estimate engine --rate 2 --prompt-tokens 256 --output-tokens 64
    specbuild estimate engine --rate 50 --target-ttft-ms 500 --target-tpot-ms 60
    specbuild estimate gpu-engine --costs prefill.json --gpu h200 --rate 20
    """
    from specbuild.cli.estimate.costs import costs_for, with_draft
    from specbuild.cli.estimate.prediction import predict
    from specbuild.cli.estimate.show import estimate_tables, estimate_text
    from specbuild.cli.terminal import console
    from specbuild.cli.terminal.progress_bar import ProgressBar
    from specbuild.runtime.engine_dir.files import read_manifest
    from specbuild.runtime.measure.serving.simulation import Traffic, require_fitting

    manifest = read_manifest(engine)
    traffic_options = Traffic(
        requests=traffic.requests,
        prompt_tokens=traffic.prompt_tokens,
        output_tokens=traffic.output_tokens,
        rate=traffic.rate,
        clients=traffic.clients,
        request_s=traffic.request_ms / 1e3,
        seed=traffic.seed,
    )
    require_fitting(manifest, traffic_options)
    contexts = tuple(
        sorted(
            {
                traffic_options.prompt_tokens,
                traffic_options.prompt_tokens + traffic_options.output_tokens // 2,
            }
        )
    )
    with ProgressBar() as progress:
        all_costs = costs_for(engine, manifest, costs, contexts, progress)
    used_costs = with_draft(all_costs, drafted=costs.acceptance > 0)
    report = predict(
        engine.resolve().name,
        manifest,
        used_costs,
        traffic_options,
        targets=targets,
        acceptance=costs.acceptance,
    )
    if as_json:
        print(console.json_line(report))
        return
    console.output().print(estimate_text(report), soft_wrap=True)
    console.output().print(estimate_tables(report))
