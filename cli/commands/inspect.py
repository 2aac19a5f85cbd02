"""``specbuild inspect``: show the contents and the predicted memory of an engine."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from specbuild.builder.options import LimitOptions
from specbuild.cli.anatomy.options import AnatomyOptions
from specbuild.cli.model.options import ModelName
from specbuild.cli.options.derived import takes_options
from specbuild.cli.options.shared import Debug, Json
from specbuild.runtime.errors import SpecbuildError

if TYPE_CHECKING:
    from specbuild.cli.model.reference import CheckpointReference, HubReference


@takes_options
def inspect(
    model: ModelName,
    *,
    anatomy: AnatomyOptions,
    gpu: Annotated[
        str | None,
        typer.Option(
            "--gpu",
            metavar="NAME",
            help="For a checkpoint: show what fits on this GPU (h100 or h200).",
            show_default=False,
        ),
    ] = None,
    revision: Annotated[
        str | None,
        typer.Option(
            "--revision",
            metavar="REVISION",
            help="Branch, tag or commit of a Hugging Face model; default: main.",
        ),
    ] = None,
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
    """Show an engine, or what can be built from a checkpoint.

    For a checkpoint directory, a GGUF file or a Hugging Face model: its
    architecture, tensor types and size, the backends that can build it, and with
    [b]--gpu h100[/b] the number of sequences that fit. No weights are read.

    For an engine: geometry, limits, sizes, ops and predicted memory.
    Memory is predicted for the engine's limits, or for the limits given here, as if
    the engine had been built with them. CUDA engines also show programs and
    kernels, TensorRT engines layers, bindings and profiles, and engines
    from GGUF files the types of the source tensors.

    [b]--anatomy[/b] lists each launch of a CUDA engine's steps, without a draft and with
    the deepest chain: its bytes, the minimum time to read them, and its
    dependencies. Identical layers are combined.

    \b
    Examples:
    specbuild inspect target --gpu h100
    specbuild inspect engine --max-batch-size 8 --max-seq-len 8192
    specbuild inspect gpu-engine --anatomy --context 8192
    """
    from specbuild.cli.model.reference import EngineReference, model_reference

    reference = model_reference(model)
    if not isinstance(reference, EngineReference):
        if anatomy.anatomy:
            raise SpecbuildError(f"{model} is no engine: --anatomy shows the steps of CUDA engines")
        _show_checkpoint(
            reference,
            gpu,
            revision,
            LimitOptions(max_seq_len=max_seq_len, max_batch_size=max_batch_size),
            as_json=as_json,
        )
        return
    if gpu is not None or revision is not None:
        raise SpecbuildError(f"{model} is an engine: --gpu and --revision are for checkpoints")
    if anatomy.anatomy:
        _show_anatomies(reference.path, anatomy, as_json=as_json)
        return
    _show_engine(
        reference.path, max_batch_size=max_batch_size, max_seq_len=max_seq_len, as_json=as_json
    )


def _show_engine(
    engine: Path, *, max_batch_size: int | None, max_seq_len: int | None, as_json: bool
) -> None:
    from specbuild.builder.engine.cache_capacity import cache_capacity
    from specbuild.cli.tables.build_facts import build_facts, build_tables
    from specbuild.cli.tables.predicted_memory import as_built_for, predict_memory
    from specbuild.runtime.engine_dir.backends import facts_of
    from specbuild.runtime.engine_dir.files import manifest_digest_of, read_manifest

    manifest, digest = read_manifest(engine), manifest_digest_of(engine)[:64]
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
        facts |= built.named()
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
    for table in build_tables(manifest, built):
        output().print(table)
    if facts_of_plan is not None:
        output().print(plan_tables(facts_of_plan))
    if costs is not None:
        output().print(step_cost_table(costs))


def _show_checkpoint(
    reference: CheckpointReference | HubReference,
    gpu: str | None,
    revision: str | None,
    limits: LimitOptions,
    *,
    as_json: bool,
) -> None:
    from specbuild.builder.backends.cuda.gpus import gpu_model
    from specbuild.builder.options import BuildOptions
    from specbuild.cli.model.engine import local_checkpoint
    from specbuild.cli.terminal.console import json_line, output
    from specbuild.cli.terminal.progress_bar import ProgressBar

    limits.check_bounds(limits.given())
    card = None if gpu is None else gpu_model(gpu)
    with ProgressBar() as progress:
        path = local_checkpoint(reference, revision, progress)

    # These import torch and the exporters, which takes seconds: a wrong name is reported before.
    from specbuild.cli.model.inspection import checkpoint_report
    from specbuild.cli.tables.checkpoint_table import checkpoint_tables

    options = BuildOptions(model=path, output=Path("unnamed"), limits=limits)
    report = checkpoint_report(reference.title, options, card)
    if as_json:
        print(json_line(report))
    else:
        output().print(checkpoint_tables(report))


def _show_anatomies(engine: Path, options: AnatomyOptions, *, as_json: bool) -> None:
    from specbuild.cli.anatomy.planned import planned_anatomies
    from specbuild.cli.anatomy.tables import anatomy_tables
    from specbuild.cli.terminal.console import json_line, output
    from specbuild.runtime.engine_dir.files import read_manifest

    steps = planned_anatomies(engine, read_manifest(engine), options)
    if as_json:
        print(json_line({"anatomies": steps}))
        return
    for step in steps:
        output().print(anatomy_tables(step))
