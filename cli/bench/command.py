"""``specbuild bench``: one command for each kind of measurement."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from specbuild.builder.options import TreeOptions
from specbuild.cli.bench.options import (
    ModeOptions,
    ServerLoadOptions,
    SuiteOptions,
    SweepOptions,
)
from specbuild.cli.options.derived import Without, takes_options
from specbuild.cli.options.draft_choice import draft_setting_of
from specbuild.cli.options.shared import (
    Debug,
    DrafterName,
    DraftTree,
    Json,
    NoSpec,
    Threads,
    suggest_neighbour,
)
from specbuild.cli.terminal.help_page import Command, show_help_alone
from specbuild.cli.terminal.plot_file import require_plot_place
from specbuild.runtime.errors import SpecbuildError

if TYPE_CHECKING:
    from specbuild.cli.bench.pairs import BenchReport, PairsSettings, PromptSet
    from specbuild.runtime.engine import Engine
    from specbuild.runtime.request import GenerateParams

_RANDOM_SEED = 1
# Contexts of `bench modes` without --context.
MODE_CONTEXTS = (512, 1536)
_PANEL = "Measurement"

EngineDirectory = Annotated[
    Path,
    typer.Argument(metavar="ENGINE", help="Engine directory.", callback=suggest_neighbour),
]
Prompts = Annotated[
    list[Path] | None,
    typer.Option(
        "--prompts",
        metavar="FILE.jsonl",
        help="Prompt set, reported separately; repeatable.",
        rich_help_panel=_PANEL,
    ),
]
JoinedPrompts = Annotated[
    list[Path] | None,
    typer.Option(
        "--prompts",
        metavar="FILE.jsonl",
        help="Prompts, concatenated to one text; repeatable.",
        rich_help_panel=_PANEL,
    ),
]
MaxNewTokens = Annotated[
    int,
    typer.Option(
        "--max-new-tokens", metavar="N", min=2, help="Tokens per output.", rich_help_panel=_PANEL
    ),
]
Rounds = Annotated[
    int,
    typer.Option(
        "--rounds", metavar="N", min=1, help="Measured pairs per prompt.", rich_help_panel=_PANEL
    ),
]
Raw = Annotated[
    bool,
    typer.Option("--raw", help="Do not apply the chat template.", rich_help_panel=_PANEL),
]
Plot = Annotated[
    Path | None,
    typer.Option(
        "--plot", metavar="FILE.svg", help="Also write a chart.", rich_help_panel="Report"
    ),
]

bench = typer.Typer(
    help="Measure engines and servers.",
    invoke_without_command=True,
)


@bench.callback()
def _bench(context: typer.Context) -> None:
    """Measure engines and servers."""
    show_help_alone(context)


@bench.command("pairs", cls=Command)
@takes_options
def bench_pairs(
    engine: EngineDirectory,
    *,
    prompts: Prompts = None,
    max_new_tokens: MaxNewTokens = 128,
    rounds: Rounds = 3,
    raw: Raw = False,
    plot: Plot = None,
    against: Annotated[
        Path | None,
        typer.Option(
            "--against",
            metavar="FILE.json",
            help="Compare the acceptance with this report of another engine.",
            rich_help_panel="Report",
        ),
    ] = None,
    drafter: DrafterName = None,
    draft_tree: DraftTree = None,
    no_spec: NoSpec = False,
    tree: TreeOptions,
    threads: Threads = None,
    as_json: Json = False,
    _debug: Debug = False,
) -> None:
    """Measure decoding speed and acceptance, with and without the draft.

    Each prompt is decoded greedily both ways, one directly after the other, in
    alternating order. Results are medians over these pairs. With [b]--no-spec[/b] only
    decoding without the draft is measured. Without [b]--prompts[/b] the prompts are random
    tokens, which no draft can predict.

    [b]--against[/b] compares with the output of [b]bench pairs --json[/b] for an engine with
    another [b]--draft-dtype[/b], with the same prompts and draft options.

    \b
    Examples:
    specbuild bench pairs engine --prompts prompts.jsonl
    specbuild bench pairs engine --no-spec --json
    """
    from specbuild.cli.bench import against as bench_against
    from specbuild.cli.bench.pairs import PairsSettings
    from specbuild.cli.terminal.engine_loading import load_engine
    from specbuild.runtime.settings import PrefillSchedule, RuntimeSettings

    require_plot_place(plot)
    other = None if against is None else bench_against.read_report(against)
    # All prompts are prefilled first, so that full batches are timed.
    prefill = PrefillSchedule(steps_between=0)
    loaded = load_engine(engine, RuntimeSettings(threads=threads, prefill=prefill))
    setting = draft_setting_of(
        loaded.manifest, tree, no_spec=no_spec, drafter=drafter, tree_file=draft_tree
    )
    if other is not None and setting.speculation == "default":
        raise SpecbuildError(
            "--against compares one draft, and the default changes with what it meets: give "
            "--draft-top-k, --draft-depth and --draft-tokens, as the other report was made with"
        )
    settings = PairsSettings(max_new_tokens, rounds, setting, raw)
    report = _measured(loaded, settings, prompts or [])
    if other is not None:
        report = bench_against.against(report, other)
    _write_report(report, plot, as_json=as_json)


@bench.command("sweep", cls=Command)
@takes_options
def bench_sweep(
    engine: EngineDirectory,
    phases: Annotated[
        str,
        typer.Argument(
            metavar="PHASES",
            help="Comma-separated list of decode, verify, draft, profile, anatomy, prefill, spec, "
            "load and specpv.",
        ),
    ],
    *,
    prompts: Prompts = None,
    max_new_tokens: MaxNewTokens = 128,
    rounds: Rounds = 3,
    raw: Raw = False,
    sweep: SweepOptions,
    plot: Plot = None,
    as_json: Json = False,
    _debug: Debug = False,
) -> None:
    """Measure phases of a CUDA engine against the bytes that each must read.

    Each phase is compared with a streaming read of the same bytes. [b]anatomy[/b] shows each
    launch of a step.

    \b
    Examples:
    specbuild bench sweep gpu-engine decode,verify,draft,prefill --plot roofline.svg
    specbuild bench sweep gpu-engine anatomy --batch 1 --context 1000 --plot step.svg
    """
    from specbuild.cli.bench.sweep import SweepSettings, run_sweep, sweeps_of
    from specbuild.cli.bench.table import sweep_tables
    from specbuild.cli.bench.views import VIEW_SWEEP
    from specbuild.cli.terminal import console

    # Options that are not given keep the defaults of the settings.
    chosen = sweep.given()
    settings = SweepSettings(
        sweeps_of(phases),
        **chosen,
        prompts=prompts or (),
        max_new_tokens=max_new_tokens,
        rounds=rounds,
        raw=raw,
    )
    if "retrieved" in chosen and VIEW_SWEEP not in settings.sweeps:
        raise SpecbuildError(f"--retrieved is for the phase {VIEW_SWEEP}: add it, or omit it")
    require_plot_place(plot)
    report = run_sweep(engine, settings)
    if as_json:
        print(console.json_line(report))
    else:
        console.output().print(sweep_tables(report))
    if plot is None:
        return
    if report.phases or not report.anatomies:
        from specbuild.cli.bench.roofline import plot_sweep

        plot_sweep(report, plot)
    else:
        from specbuild.cli.anatomy.timeline import plot_anatomies

        plot_anatomies(report.anatomies, plot, engine=f"{report.engine} on {report.gpu}")


@bench.command("suite", cls=Command)
@takes_options
def bench_suite(
    engine: EngineDirectory,
    suite: Annotated[
        str,
        typer.Argument(
            metavar="SUITE",
            help="YAML file of scenarios, or a built-in suite: smoke, single-32k or "
            "large-context-16k-x4.",
        ),
    ],
    *,
    prompts: Annotated[
        Path | None,
        typer.Option("--prompts", metavar="FILE.jsonl", help="Prompt set.", rich_help_panel=_PANEL),
    ] = None,
    files: SuiteOptions,
    threads: Threads = None,
    as_json: Json = False,
    _debug: Debug = False,
) -> None:
    """Check scenarios against thresholds; the exit code is 1 if one is missed.

    \b
    Examples:
    specbuild bench suite engine smoke --junit smoke.xml
    """
    from specbuild.cli.bench.suite.command import run_suite

    run_suite(engine, suite, files, prompts, threads=threads, as_json=as_json)


@bench.command("modes", cls=Command)
@takes_options
def bench_modes(
    modes: Annotated[
        str,
        typer.Argument(
            metavar="MODES",
            help="Comma-separated list of base, eagle3, specpv, mla and dsa, or combinations "
            "with +.",
        ),
    ],
    *,
    max_new_tokens: MaxNewTokens = 128,
    rounds: Rounds = 3,
    sizes: Annotated[SweepOptions, Without(("batches", "retrieved", "limit_s"))],
    files: ModeOptions,
    plot: Plot = None,
    threads: Threads = None,
    as_json: Json = False,
    _debug: Debug = False,
) -> None:
    """Compare modes of one checkpoint: speed, cache size and fidelity by context.

    Builds missing engines: without a draft, with one, and with SpecPV, latents and DSA.

    \b
    Examples:
    specbuild bench modes base,eagle3,dsa --build modes.yaml --engines engines --text book.txt
    """
    from specbuild.cli.bench.modes.command import run_modes
    from specbuild.cli.bench.modes.measurement import ModesSettings

    contexts = sizes.contexts or MODE_CONTEXTS
    settings = ModesSettings(contexts, files.judged, new_tokens=max_new_tokens, rounds=rounds)
    run_modes(modes, files, settings, threads=threads, plot=plot, as_json=as_json)


@bench.command("drafters", cls=Command)
@takes_options
def bench_drafters(
    engine: EngineDirectory,
    *,
    prompts: JoinedPrompts = None,
    max_new_tokens: MaxNewTokens = 128,
    rounds: Rounds = 3,
    sizes: Annotated[SweepOptions, Without(("retrieved", "limit_s"))],
    plot: Plot = None,
    threads: Threads = None,
    as_json: Json = False,
    _debug: Debug = False,
) -> None:
    """Compare no draft, each of the engine's drafters, and automatic selection.

    \b
    Examples:
    specbuild bench drafters engine --prompts prompts.jsonl --batch 1 --batch 4 --context 512
    """
    from specbuild.cli.bench.drafters.command import run_drafters
    from specbuild.cli.bench.drafters.measurement import DraftersSettings

    settings = DraftersSettings(sizes.batches, sizes.contexts, max_new_tokens, rounds)
    run_drafters(engine, prompts or (), settings, threads=threads, plot=plot, as_json=as_json)


@bench.command("server", cls=Command)
@takes_options
def bench_server(
    url: Annotated[str, typer.Argument(metavar="URL", help="Address of the server.")],
    *,
    prompts: Prompts = None,
    max_new_tokens: MaxNewTokens = 128,
    load: ServerLoadOptions,
    plot: Plot = None,
    as_json: Json = False,
    _debug: Debug = False,
) -> None:
    """Measure a server with OpenAI's API: TTFT and inter-token latency as seen by clients.

    \b
    Examples:
    specbuild bench server http://127.0.0.1:8000 --clients 8 --requests 64
    """
    from specbuild.cli.bench.server.command import run_load

    run_load(url, load, prompts or (), max_new_tokens=max_new_tokens, plot=plot, as_json=as_json)


def _measured(engine: Engine, settings: PairsSettings, files: Sequence[Path]) -> BenchReport:
    from specbuild.cli.bench.pairs import measure
    from specbuild.cli.terminal.progress_bar import ProgressBar

    sets = _prompt_sets(engine, files, settings.params)
    with ProgressBar() as progress:
        return measure(engine, sets, settings, progress)


def _write_report(report: BenchReport, plot: Path | None, *, as_json: bool) -> None:
    from specbuild.cli.terminal import console

    if as_json:
        print(console.json_line(report))
    else:
        _show(report)
    if plot is not None:
        from specbuild.cli.bench.plot import plot as draw

        draw(report, plot)


def _show(report: BenchReport) -> None:
    from specbuild.cli.bench.pair_table import bench_table
    from specbuild.cli.terminal.console import output

    pairs = "pair" if report.rounds == 1 else "pairs"
    print(f"{report.max_new_tokens} tokens greedily, {report.rounds} {pairs} a prompt, medians")
    output().print(bench_table(report))
    stored = "" if report.draft_dtype is None else f", weights in {report.draft_dtype}"
    output().print(f"draft: {report.draft}{stored}", soft_wrap=True)


def _prompt_sets(engine: Engine, files: Sequence[Path], params: GenerateParams) -> list[PromptSet]:
    from specbuild.cli.bench.pairs import PromptSet, random_prompts
    from specbuild.cli.terminal.prompt_file import read_prompt_file, tokenised

    if not files:
        longest = max(1, engine.manifest.limits.max_seq_len // 2)
        return [random_prompts(engine.manifest.target.vocab, longest, seed=_RANDOM_SEED)]
    return [
        PromptSet(file.stem, tuple(tokenised(engine, read_prompt_file(file), params)))
        for file in files
    ]
