"""``specbuild synth``: a model of known behaviour, in a checkpoint's or an engine's true size."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from specbuild.cli.options import dsa as dsa_options
from specbuild.cli.options import shared as options
from specbuild.cli.options import specpv as specpv_options
from specbuild.runtime.errors import SpecbuildError

if TYPE_CHECKING:
    from specbuild.builder.options import BuildOptions
    from specbuild.builder.synth.model import SynthModel
    from specbuild.builder.synth.routing import DistinctExperts


def synth(
    *,
    geometry: Annotated[
        str,
        typer.Option("--geometry", metavar="NAME", help="gpt-oss-20b, gpt-oss-120b or tiny."),
    ],
    output: Annotated[
        Path | None,
        typer.Option("--output", metavar="DIR", help="Where to write the checkpoints."),
    ] = None,
    engine: Annotated[
        Path | None,
        typer.Option("--engine", metavar="DIR", help="Engine to write instead of checkpoints."),
    ] = None,
    draft: Annotated[bool, typer.Option("--draft", help="Make an EAGLE3 draft too.")] = False,
    acceptance: Annotated[
        float | None,
        typer.Option(
            "--acceptance",
            metavar="P",
            min=0.0,
            max=1.0,
            help="Probability that the draft is right, at each position; 0.7 if left out.",
        ),
    ] = None,
    layers: Annotated[
        int | None, typer.Option("--layers", metavar="N", min=1, help="Fewer layers, for tests.")
    ] = None,
    unique_layers: Annotated[
        int | None,
        typer.Option(
            "--unique-layers",
            metavar="U",
            min=1,
            help="Store U layers and name them again for the others; needs --engine.",
        ),
    ] = None,
    latent: Annotated[
        int,
        typer.Option(
            "--latent",
            metavar="R",
            min=0,
            help="Cache latents of R values in place of keys and values; needs --engine.",
        ),
    ] = 0,
    indexer: Annotated[
        int,
        typer.Option(
            "--indexer",
            metavar="D",
            min=0,
            help="Give full-attention layers indexers of width D (DSA); needs --engine.",
        ),
    ] = 0,
    seed: Annotated[int, typer.Option("--seed", metavar="S", min=0, help="Random seed.")] = 0,
    prompts: Annotated[
        int, typer.Option("--prompts", metavar="N", min=1, help="Prompts to write.")
    ] = 100,
    prompt_tokens: Annotated[
        int, typer.Option("--prompt-tokens", metavar="N", min=1, help="Tokens of each prompt.")
    ] = 128,
    backend: Annotated[
        Literal["cpu", "cuda"] | None,
        typer.Option("--backend", help="What the engine runs on; cpu if left out."),
    ] = None,
    gpu: Annotated[
        str | None, typer.Option("--gpu", metavar="ARCH", help="GPU to compile the engine for.")
    ] = None,
    max_seq_len: Annotated[
        int | None,
        typer.Option("--max-seq-len", metavar="N", min=1, help="The engine's longest sequence."),
    ] = None,
    max_batch_size: Annotated[
        int | None,
        typer.Option("--max-batch-size", metavar="N", min=1, help="The engine's largest batch."),
    ] = None,
    page_size: Annotated[
        int | None,
        typer.Option("--page-size", metavar="N", min=1, help="Tokens in a page of its KV cache."),
    ] = None,
    draft_top_k: options.DraftTopK = None,
    draft_depth: options.DraftDepth = None,
    draft_tokens: options.DraftTokens = None,
    draft_dtype: options.DraftDtype = None,
    tactics: options.Tactics = None,
    tuned_only: options.TunedOnly = False,
    draft_window: Annotated[
        int | None,
        typer.Option("--draft-window", metavar="N", min=1, help="Tokens that the draft sees."),
    ] = None,
    specpv: specpv_options.Enable = False,
    specpv_block_size: specpv_options.BlockSize = None,
    specpv_n_retrieval_blocks: specpv_options.RetrievalBlocks = None,
    specpv_n_spec_tokens_buf: specpv_options.SpecTokensBuf = None,
    specpv_partial_threshold: specpv_options.PartialThreshold = None,
    specpv_full_refresh_interval: specpv_options.FullRefreshInterval = None,
    specpv_score: specpv_options.Score = None,
    dsa_top_k: dsa_options.TopK = None,
    dsa_threshold: dsa_options.Threshold = None,
    dsa_key_dtype: dsa_options.KeyDtype = None,
    dsa_check_interval: dsa_options.CheckInterval = None,
    force: Annotated[bool, typer.Option("--force", help="Replace an existing output.")] = False,
    _debug: options.Debug = False,
) -> None:
    """Make a GPT-OSS of true geometry and random weights, whose behaviour is known.

    Greedy decoding follows a random permutation of the tokens. The draft agrees
    with it after the share [b]--acceptance[/b] of its tokens, at every level, so the
    acceptance that an engine measures is real and known beforehand. That holds for
    prompts of tokens that the draft can say: take them from [b]prompts.jsonl[/b] in the
    output, or from ENGINE[b].prompts.jsonl[/b] beside an engine. There is no tokenizer.

    \b
    Examples:
    specbuild synth --geometry gpt-oss-20b --draft --acceptance 0.7 --output synth-20b
    specbuild synth --geometry tiny --draft --output synth-tiny --force
    specbuild synth --geometry gpt-oss-120b --draft --unique-layers 4 --engine e --backend cuda
    specbuild synth --geometry gpt-oss-20b --unique-layers 2 --latent 512 --engine e --backend cuda
    specbuild synth --geometry gpt-oss-20b --unique-layers 2 --indexer 64 --engine e --backend cuda
    """
    from specbuild.builder.options import BuildOptions
    from specbuild.builder.synth.model import DEFAULT_ACCEPTANCE, SynthModel, SynthOptions

    if acceptance is not None and not draft:
        raise SpecbuildError(f"--acceptance {acceptance} needs a draft; add --draft")
    built: dict[str, Any] = {
        "backend": backend,
        "gpu": gpu,
        "max_seq_len": max_seq_len,
        "max_batch_size": max_batch_size,
        "page_size": page_size,
        "draft_top_k": draft_top_k,
        "draft_depth": draft_depth,
        "draft_tokens": draft_tokens,
        "draft_dtype": draft_dtype,
        "tactics": tactics,
        "tuned_only": tuned_only or None,
        "draft_window": draft_window,
        "specpv": specpv or None,
        "specpv_block_size": specpv_block_size,
        "specpv_n_retrieval_blocks": specpv_n_retrieval_blocks,
        "specpv_n_spec_tokens_buf": specpv_n_spec_tokens_buf,
        "specpv_partial_threshold": specpv_partial_threshold,
        "specpv_full_refresh_interval": specpv_full_refresh_interval,
        "specpv_score": specpv_score,
        "dsa_top_k": dsa_top_k,
        "dsa_threshold": dsa_threshold,
        "dsa_key_dtype": dsa_key_dtype,
        "dsa_check_interval": dsa_check_interval,
    }
    given = {name: value for name, value in built.items() if value is not None}
    asked = SynthOptions(
        geometry=geometry,
        layers=layers,
        acceptance=(DEFAULT_ACCEPTANCE if acceptance is None else acceptance) if draft else None,
        seed=seed,
        unique_layers=unique_layers,
        latent=latent,
        indexer=indexer,
        prompts=prompts,
        prompt_tokens=prompt_tokens,
    )
    if (output is None) == (engine is None):
        raise SpecbuildError("give one of --output DIR, for checkpoints, and --engine DIR")
    if output is not None and given:
        name = next(iter(given)).replace("_", "-")
        raise SpecbuildError(f"--{name} is about an engine; give --engine DIR in place of --output")
    model = SynthModel(asked)
    if output is not None:
        _write_checkpoints(model, output, force=force)
    elif engine is not None:
        _build_engine(
            model, BuildOptions.from_flat(model=Path(geometry), output=engine, force=force, **given)
        )


def _write_checkpoints(model: SynthModel, output: Path, *, force: bool) -> None:
    from specbuild.builder.synth.synth import write_checkpoints
    from specbuild.cli.terminal.console import fact_table, messages, size_text
    from specbuild.cli.terminal.progress_bar import ProgressBar

    with ProgressBar() as progress:
        experts = write_checkpoints(model, output, progress, force=force)
    table = fact_table("made")
    table.add_row("checkpoints", str(output))
    table.add_row("size", size_text(model.nbytes))
    messages().print(table)
    _print_experts(experts)


def _build_engine(model: SynthModel, asked: BuildOptions) -> None:
    from specbuild.builder.synth.synth import build_engine, prompts_beside
    from specbuild.cli.tables.engine_table import add_tactics, build_summary
    from specbuild.cli.terminal.console import messages
    from specbuild.cli.terminal.progress_bar import ProgressBar
    from specbuild.runtime.engine_dir.files import read_manifest

    with ProgressBar() as progress:
        report, experts = build_engine(model, asked, progress)
    table = build_summary(asked.output, read_manifest(asked.output))
    add_tactics(table, report.cuda)
    table.add_row("prompts", str(prompts_beside(asked.output)))
    messages().print(table)
    _print_experts(experts)


def _print_experts(experts: tuple[DistinctExperts, ...]) -> None:
    from rich.table import Table

    from specbuild.cli.terminal.console import messages

    table = Table(title="distinct experts per step, mean of the layers", title_justify="left")
    for column in ("tokens", "experts", "if uniform"):
        table.add_column(column, justify="right")
    for entry in experts:
        table.add_row(str(entry.tokens), f"{entry.mean:.1f}", f"{entry.uniform:.1f}")
    messages().print(table)
