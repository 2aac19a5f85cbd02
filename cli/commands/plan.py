"""``specbuild plan``: what a server of an engine will do, and how many are needed."""

from __future__ import annotations

from specbuild.cli.options.derived import takes_options
from specbuild.cli.options.shared import Debug, EngineDirectory, Json
from specbuild.cli.plan.options import CostOptions, TargetOptions, TrafficOptions


@takes_options
def plan(
    engine: EngineDirectory,
    *,
    traffic: TrafficOptions,
    costs: CostOptions,
    targets: TargetOptions,
    as_json: Json = False,
    _debug: Debug = False,
) -> None:
    """Predict times to the first token and a token, and replicas for a target.

    The engine's own scheduler is run over measured times of launches, without
    running them: chunks of prompts, turns, batches and waiting for pages are as
    they will be. A CPU engine is measured first, some seconds long. For a CUDA engine
    no GPU is needed: its steps are those that [b]tune[/b] stored, its prompts those of
    [b]bench --sweep prefill --json[/b].

    \b
    Examples:
    specbuild plan engine --rate 2 --prompt-tokens 256 --output-tokens 64
    specbuild plan engine --rate 50 --target-ttft-ms 500 --target-tpot-ms 60
    specbuild plan gpu-engine --costs prefill.json --gpu h200 --rate 20
    """
    from specbuild.cli.plan.costs import costs_for, with_draft
    from specbuild.cli.plan.prediction import predict
    from specbuild.cli.plan.show import plan_tables, plan_text
    from specbuild.cli.terminal import console
    from specbuild.cli.terminal.progress_bar import ProgressBar
    from specbuild.runtime.engine_dir.files import read_manifest
    from specbuild.runtime.measure.serving.simulation import Traffic, require_fitting

    manifest = read_manifest(engine)
    asked = Traffic(
        requests=traffic.requests,
        prompt_tokens=traffic.prompt_tokens,
        output_tokens=traffic.output_tokens,
        rate=traffic.rate,
        clients=traffic.clients,
        request_s=traffic.request_ms / 1e3,
        seed=traffic.seed,
    )
    require_fitting(manifest, asked)
    contexts = tuple(sorted({asked.prompt_tokens, asked.prompt_tokens + asked.output_tokens // 2}))
    with ProgressBar() as progress:
        found = costs_for(engine, manifest, costs, contexts, progress)
    known = with_draft(found, drafted=costs.acceptance > 0)
    report = predict(
        engine.resolve().name,
        manifest,
        known,
        asked,
        targets=targets,
        acceptance=costs.acceptance,
    )
    if as_json:
        print(console.json_line(report))
        return
    console.output().print(plan_text(report), soft_wrap=True)
    console.output().print(plan_tables(report))
