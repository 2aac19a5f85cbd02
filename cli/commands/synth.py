"""``specbuild synth``: a synthetic model with known output, in the sizes of a real one."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from specbuild.builder.kernel_options import KernelOptions
from specbuild.builder.option_group import HostDrafterName
from specbuild.builder.options import (
    BuildOptions,
    DraftOptions,
    DsaOptions,
    LimitOptions,
    SpecPvOptions,
)
from specbuild.builder.suffix_options import SuffixOptions
from specbuild.builder.synth.options import DEFAULT_ACCEPTANCE, DEFAULT_DRAFT_KIND, SynthOptions
from specbuild.cli.options.derived import Without, takes_options
from specbuild.cli.options.shared import Debug
from specbuild.runtime.errors import SpecbuildError

if TYPE_CHECKING:
    from specbuild.builder.synth.model import SynthModel
    from specbuild.builder.synth.routing import DistinctExperts

_OUTPUT = "Output"


@takes_options
def synth(
    asked: SynthOptions,
    *,
    draft: Annotated[
        bool, typer.Option("--draft", help="Also create a draft.", rich_help_panel="Model")
    ] = False,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            metavar="DIR",
            help="Directory for the checkpoints.",
            rich_help_panel=_OUTPUT,
        ),
    ] = None,
    engine: Annotated[
        Path | None,
        typer.Option(
            "--engine",
            metavar="DIR",
            help="Engine directory to write, instead of checkpoints.",
            rich_help_panel=_OUTPUT,
        ),
    ] = None,
    backend: Annotated[
        Literal["cpu", "cuda"] | None,
        typer.Option(
            "--backend",
            metavar="NAME",
            help="Backend of the engine: cpu or cuda.",
            show_default="cpu",
            rich_help_panel=_OUTPUT,
        ),
    ] = None,
    gpu: Annotated[
        str | None,
        typer.Option(
            "--gpu",
            metavar="ARCH",
            help="GPU architecture of the engine.",
            rich_help_panel=_OUTPUT,
        ),
    ] = None,
    tensor_parallel: Annotated[
        int | None,
        typer.Option(
            "--tensor-parallel",
            metavar="N",
            help="Number of GPUs that run the engine together: 1, 2, 4 or 8.",
            show_default="1",
            rich_help_panel=_OUTPUT,
        ),
    ] = None,
    force: Annotated[
        bool,
        typer.Option("--force", help="Replace an existing output.", rich_help_panel=_OUTPUT),
    ] = False,
    drafter: Annotated[
        HostDrafterName | None,
        typer.Option(
            "--drafter",
            metavar="NAME",
            help="suffix: add suffix decoding, alone or with --draft.",
            show_default=False,
            rich_help_panel=SuffixOptions.PANEL,
        ),
    ] = None,
    limits: LimitOptions,
    drafting: DraftOptions,
    suffix: SuffixOptions,
    kernels: KernelOptions,
    specpv: SpecPvOptions,
    dsa: Annotated[DsaOptions, Without(("enabled",))],
    _debug: Debug = False,
) -> None:
    """Create a synthetic model: the sizes of a real model, random weights, known output.

    Greedy decoding follows a random permutation of the tokens. At each level the
    draft is correct with probability [b]--acceptance[/b], so the measured acceptance is
    known in advance. This holds for prompts of tokens in the draft's
    vocabulary: use [b]prompts.jsonl[/b] in the output, or ENGINE[b].prompts.jsonl[/b] next
    to an engine. There is no tokenizer.

    \b
    Examples:
    specbuild synth --geometry gpt-oss-20b --draft --output synth-20b
    specbuild synth --geometry gpt-oss-20b --latent 512 --engine e --backend cuda
    specbuild synth --geometry tiny --draft --drafter suffix --engine tiny-engine
    """
    from specbuild.builder.synth.model import SynthModel

    if asked.acceptance is not None and not draft:
        raise SpecbuildError(f"--acceptance {asked.acceptance} needs a draft; add --draft")
    if asked.draft_kind != DEFAULT_DRAFT_KIND and not draft:
        raise SpecbuildError(f"--draft-kind {asked.draft_kind} needs a draft; add --draft")
    if asked.target_entropy is not None and asked.acceptance is not None:
        raise SpecbuildError("--acceptance: with --target-entropy, give --draft-tv")
    if asked.draft_tv is not None and not draft:
        raise SpecbuildError(f"--draft-tv {asked.draft_tv} needs a draft; add --draft")
    if draft and asked.acceptance is None:
        certain = asked.target_entropy is None
        asked = replace(asked, acceptance=DEFAULT_ACCEPTANCE if certain else 1.0)
    if (output is None) == (engine is None):
        raise SpecbuildError("give one of --output DIR, for checkpoints, and --engine DIR")
    if engine is None:
        flags = {
            "--backend": backend, "--gpu": gpu, "--tensor-parallel": tensor_parallel,
            "--drafter": drafter,
        }  # fmt: skip
        flags_of_model = [flag for flag, given in flags.items() if given]
        groups = (limits, drafting, suffix, kernels, specpv, dsa)
        flags_of_model += [group.flag(name) for group in groups for name in group.given()]
        if flags_of_model:
            raise SpecbuildError(
                f"{flags_of_model[0]} is about an engine; give --engine DIR in place of --output"
            )
    model = SynthModel(asked)
    if output is not None:
        _write_checkpoints(model, output, force=force)
    elif engine is not None:
        built = BuildOptions(
            model=Path(asked.geometry),
            output=engine,
            backend=backend or "cpu",
            gpu=gpu,
            tensor_parallel=tensor_parallel,
            drafter=drafter,
            limits=limits,
            drafting=drafting,
            suffix=suffix,
            kernels=kernels,
            specpv=specpv,
            dsa=dsa,
            force=force,
        )
        _build_engine(model, built)


def _write_checkpoints(model: SynthModel, output: Path, *, force: bool) -> None:
    from specbuild.builder.synth.synth import write_checkpoints
    from specbuild.cli.terminal.console import fact_table, messages, size_text
    from specbuild.cli.terminal.progress_bar import ProgressBar

    with ProgressBar() as progress:
        experts = write_checkpoints(model, output, progress, force=force)
    table = fact_table("made")
    table.add_row("checkpoints", str(output))
    size = sum(file.stat().st_size for file in output.rglob("*") if file.is_file())
    table.add_row("size", size_text(size))
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
