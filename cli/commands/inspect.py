"""``specbuild inspect``: show the contents and the predicted memory of an engine."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from specbuild.cli.anatomy.options import AnatomyOptions
from specbuild.cli.options.derived import takes_options
from specbuild.cli.options.shared import Debug, EngineDirectory, Json

if TYPE_CHECKING:
    from specbuild.runtime.engine_dir.manifest import Manifest


@takes_options
def inspect(
    engine: EngineDirectory,
    *,
    anatomy: AnatomyOptions,
    max_batch_size: Annotated[
        int | None,
        typer.Option(
            "--max-batch-size", metavar="N", min=1, help="Predict the memory for this batch size."
        ),
    ] = None,
    max_seq_len: Annotated[
        int | None,
        typer.Option(
            "--max-seq-len", metavar="N", min=1, help="Predict the memory for this sequence length."
        ),
    ] = None,
    as_json: Json = False,
    _debug: Debug = False,
) -> None:
    """Show an engine's geometry, limits, sizes, ops and predicted memory.

    Memory is predicted for the engine's limits, or for the limits given here, as if
    the engine had been built with them. CUDA engines also show programs and
    kernels, TensorRT engines layers, bindings and profiles, and engines
    from GGUF files the types of the source tensors.

    [b]--anatomy[/b] lists each launch of a CUDA engine's steps, without a draft and with
    the deepest chain: its bytes, the minimum time to read them, and its
    dependencies. Identical layers are combined.

    \b
    Examples:
    specbuild inspect engine
    specbuild inspect engine --max-batch-size 8 --max-seq-len 8192
    specbuild inspect gpu-engine --anatomy --context 8192
    """
    from specbuild.builder.engine.cache_capacity import cache_capacity
    from specbuild.cli.tables.build_facts import build_facts, refused_table, source_types_table
    from specbuild.cli.tables.predicted_memory import as_built_for, predict_memory
    from specbuild.runtime.engine_dir.backends import facts_of
    from specbuild.runtime.engine_dir.files import manifest_digest_of, read_manifest

    manifest, digest = read_manifest(engine), manifest_digest_of(engine)[:64]
    if anatomy.anatomy:
        _show_anatomies(engine, manifest, anatomy, as_json=as_json)
        return
    facts_of_plan = plan = costs = None
    if facts_of(manifest.backend).has_plan:
        from specbuild.cli.tables.plan_tables import plan_facts, plan_tables
        from specbuild.cli.tables.step_cost_table import step_cost_facts, step_cost_table
        from specbuild.runtime.executors.cuda.check import read_plan

        plan = read_plan(engine, manifest)
        facts_of_plan = plan_facts(engine, manifest, plan)
        costs = step_cost_facts(engine, manifest, plan)
    built = build_facts(engine, manifest)
    sized = as_built_for(manifest, max_batch_size=max_batch_size, max_seq_len=max_seq_len)
    memory = predict_memory(sized, plan)
    lossy = manifest.specpv is not None or manifest.dsa is not None
    capacity = cache_capacity(sized.cache_groups, sized.limits, lossy=lossy)
    if as_json:
        import json

        from specbuild.runtime.engine_dir.strict_json import to_json

        facts = to_json(manifest) | {
            "predicted_memory": to_json(memory),
            "cache_capacity": to_json(capacity),
            "manifest_sha256": digest,
        }
        if built.refused:
            facts["refused_kernels"] = list(built.refused)
        if built.source_types:
            facts["source_types"] = built.source_types
        if facts_of_plan is not None:
            facts |= to_json(facts_of_plan) | {"step_costs": to_json(costs)}
        print(json.dumps(facts, allow_nan=False))
        return
    from specbuild.cli.tables.cache_tables import cache_tables
    from specbuild.cli.tables.engine_table import engine_tables
    from specbuild.cli.terminal.console import output

    output().print(engine_tables(manifest, memory), cache_tables(sized, memory, capacity))
    output().print(f"manifest: {digest}", soft_wrap=True)
    if manifest.tensorrt is not None:
        from specbuild.cli.tables.tensorrt_tables import tensorrt_tables

        output().print(tensorrt_tables(manifest, manifest.tensorrt))
    if built.source_types:
        output().print(source_types_table(built.source_types))
    if built.refused:
        output().print(refused_table(built.refused))
    if facts_of_plan is not None:
        output().print(plan_tables(facts_of_plan))
    if costs is not None:
        output().print(step_cost_table(costs))


def _show_anatomies(
    engine: Path, manifest: Manifest, options: AnatomyOptions, *, as_json: bool
) -> None:
    from specbuild.cli.anatomy.planned import planned_anatomies
    from specbuild.cli.anatomy.tables import anatomy_tables
    from specbuild.cli.terminal.console import json_line, output

    steps = planned_anatomies(engine, manifest, options)
    if as_json:
        print(json_line({"anatomies": steps}))
        return
    for step in steps:
        output().print(anatomy_tables(step))
