"""``specbuild bench``: how fast an engine decodes with and without its draft."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from specbuild.builder.options import TreeOptions
from specbuild.cli.bench.options import (
    ModeOptions,
    ServerLoadOptions,
    SuiteOptions,
    SweepOptions,
)
from specbuild.cli.bench.server.command import bench_server
from specbuild.cli.options.derived import takes_options
from specbuild.cli.options.draft_choice import draft_setting_of
from specbuild.cli.options.shared import Debug, DrafterName, DraftTree, Json, NoSpec, Threads
from specbuild.cli.tables.dsa_text import dsa_text
from specbuild.cli.terminal.plot_file import require_plot_place
from specbuild.runtime.errors import SpecbuildError

if TYPE_CHECKING:
    from rich.table import Table

    from specbuild.cli.bench.pairs import BenchReport, Pair, PromptSet, SetReport
    from specbuild.runtime.engine import Engine
    from specbuild.runtime.request import GenerateParams

_RANDOM_SEED = 1
# What --modes measures behind, where no --context is given.
MODE_CONTEXTS = (512, 1536)


@takes_options
def bench(
    engine: Annotated[
        Path | None, typer.Argument(metavar="[ENGINE]", help="Engine directory.")
    ] = None,
    *,
    prompts: Annotated[
        list[Path] | None,
        typer.Option(
            "--prompts",
            metavar="FILE.jsonl",
            help="A prompt set, reported on a row of its own; repeatable.",
            rich_help_panel="Measurement",
        ),
    ] = None,
    max_new_tokens: Annotated[
        int,
        typer.Option(
            "--max-new-tokens",
            metavar="N",
            min=2,
            help="Tokens of each output.",
            rich_help_panel="Measurement",
        ),
    ] = 128,
    rounds: Annotated[
        int,
        typer.Option(
            "--rounds",
            metavar="N",
            min=1,
            help="Pairs measured for each prompt.",
            rich_help_panel="Measurement",
        ),
    ] = 3,
    raw: Annotated[
        bool,
        typer.Option(
            "--raw",
            help="Feed text as it is, without the chat template.",
            rich_help_panel="Measurement",
        ),
    ] = False,
    plot: Annotated[
        Path | None,
        typer.Option(
            "--plot", metavar="FILE.svg", help="Draw the result too.", rich_help_panel="Report"
        ),
    ] = None,
    against: Annotated[
        Path | None,
        typer.Option(
            "--against",
            metavar="FILE.json",
            help="Show the acceptance lost against this report of another engine.",
            rich_help_panel="Report",
        ),
    ] = None,
    drafter: DrafterName = None,
    draft_tree: DraftTree = None,
    no_spec: NoSpec = False,
    tree: TreeOptions,
    sweep: SweepOptions,
    suite: SuiteOptions,
    modes: ModeOptions,
    server: ServerLoadOptions,
    threads: Threads = None,
    as_json: Json = False,
    _debug: Debug = False,
) -> None:
    """Measure speed with and without the draft, in one run, with acceptance.

    Each prompt is decoded greedily both ways, one right after the other, and
    which goes first alternates; medians are over these pairs.

    With [b]--no-spec[/b] decoding without the draft is measured alone.

    Without [b]--prompts[/b] the prompts are random tokens, which no draft can
    have learnt.

    [b]--against[/b] takes what [b]bench --json[/b] wrote of an engine with another
    [b]--draft-dtype[/b], for the same prompts and the same draft options.

    [b]--sweep[/b] times the phases of a CUDA engine on its GPU, each beside the
    bytes that it must read and a streaming read in the same process.

    [b]--suite[/b] judges scenarios by thresholds; exit code 1 where one is missed.

    [b]--modes[/b] builds engines of one checkpoint without a draft, with one, with
    SpecPV, latents and DSA, and measures speed, caches and fidelity by context.

    [b]--server[/b] loads a server with OpenAI's API, without an engine: times to the
    first token and between tokens, as clients see them.

    \b
    Examples:
    specbuild bench engine --prompts prompts.jsonl
    specbuild bench engine --suite smoke --junit smoke.xml
    specbuild bench --server http://127.0.0.1:8000 --clients 8 --requests 64
    """
    if server.server is not None:
        beside = bool(sweep.given() or tree.given() or suite.given() or modes.given())
        _refuse_beside_server(beside or engine is not None or against is not None)
        bench_server(
            server, prompts or (), max_new_tokens=max_new_tokens, plot=plot, as_json=as_json
        )
        return
    if modes.given():
        beside = bool(server.given() or suite.given() or tree.given() or drafter or no_spec)
        _refuse_beside_modes(beside or bool(engine or prompts or against or raw))
        how = dict(new_tokens=max_new_tokens, rounds=rounds)
        _modes(modes, sweep, how, threads=threads, plot=plot, as_json=as_json)
        return
    if engine is None or server.given():
        raise SpecbuildError("name an engine directory, or a server with --server URL")
    if suite.given():
        beside = bool(
            sweep.given() or tree.given() or against or plot or no_spec or drafter or draft_tree
        )
        _suite(engine, suite, prompts or (), beside=beside, threads=threads, as_json=as_json)
        return
    if sweep.sweep is not None:
        others = (threads, against, tree.given() or None, no_spec or None, drafter, draft_tree)
        _refuse_beside_sweep(any(other is not None for other in others))
        given = dict(prompts=prompts or (), max_new_tokens=max_new_tokens, rounds=rounds, raw=raw)
        _sweep(engine, sweep, given, plot=plot, as_json=as_json)
        return
    if sweep.given():
        raise SpecbuildError(
            "--batch, --context, --retrieved and --time-limit-s are for a --sweep: add one"
        )
    from specbuild.cli.bench import against as bench_against
    from specbuild.cli.bench import pairs as bench_measure
    from specbuild.cli.terminal.engine_loading import load_engine
    from specbuild.runtime.decode.scheduler import Turns

    require_plot_place(plot)
    other = None if against is None else bench_against.read_report(against)
    loaded = load_engine(engine, threads=threads)
    # What is timed is decoding of whole batches: all prompts are read before.
    loaded.decoder.turns = Turns(steps=0)
    setting = draft_setting_of(
        loaded.manifest, tree, no_spec=no_spec, drafter=drafter, tree_file=draft_tree
    )
    if other is not None and setting.speculation == "default":
        raise SpecbuildError(
            "--against compares one draft, and the default changes with what it meets: give "
            "--draft-top-k, --draft-depth and --draft-tokens, as the other report was made with"
        )
    plan = bench_measure.BenchPlan(max_new_tokens, rounds, setting, raw)
    report = bench_measure.measure(loaded, _prompt_sets(loaded, prompts or [], plan.params), plan)
    if other is not None:
        report = bench_against.against(report, other)
    _tell(report, plot, as_json=as_json)


def _tell(report: BenchReport, plot: Path | None, *, as_json: bool) -> None:
    from specbuild.cli.terminal import console

    if as_json:
        print(console.json_line(report))
    else:
        _show(report)
    if plot is not None:
        from specbuild.cli.bench.plot import plot as draw

        draw(report, plot)


def _show(report: BenchReport) -> None:
    from specbuild.cli.terminal.console import output

    pairs = "pair" if report.rounds == 1 else "pairs"
    print(f"{report.max_new_tokens} tokens greedily, {report.rounds} {pairs} a prompt, medians")
    output().print(bench_table(report))
    stored = "" if report.draft_dtype is None else f", weights in {report.draft_dtype}"
    output().print(f"draft: {report.draft}{stored}", soft_wrap=True)


def _suite(
    engine: Path,
    options: SuiteOptions,
    prompts: Sequence[Path],
    *,
    beside: bool,
    threads: int | None,
    as_json: bool,
) -> None:
    if options.suite is None:
        raise SpecbuildError("--junit and --record are for a --suite: add one")
    if beside or len(prompts) > 1:
        raise SpecbuildError(
            "--suite says what is measured: leave --sweep, --draft, --against and --plot out, and "
            "give --prompts once"
        )
    from specbuild.cli.bench.suite.command import bench_suite

    file = prompts[0] if prompts else None
    bench_suite(engine, options, file, threads=threads, as_json=as_json)


def _refuse_beside_server(given: bool) -> None:
    if given:
        raise SpecbuildError(
            "--server measures a server: leave ENGINE, --sweep, --suite, --modes, --draft and "
            "--against out"
        )


def _refuse_beside_modes(given: bool) -> None:
    if given:
        raise SpecbuildError(
            "--modes measures the engines that it builds: leave ENGINE, --prompts and other "
            "ways of measuring out"
        )


def _modes(
    modes: ModeOptions,
    sweep: SweepOptions,
    how: dict[str, int],
    *,
    threads: int | None,
    plot: Path | None,
    as_json: bool,
) -> None:
    if set(sweep.given()) - {"contexts"}:
        raise SpecbuildError("of --sweep's options --modes takes --context alone")
    from specbuild.cli.bench.modes.command import bench_modes
    from specbuild.cli.bench.modes.measurement import ModesPlan

    plan = ModesPlan(sweep.contexts or MODE_CONTEXTS, modes.judged, **how)
    bench_modes(modes, plan, threads=threads, plot=plot, as_json=as_json)


def _refuse_beside_sweep(given: bool) -> None:
    if given:
        raise SpecbuildError(
            "--sweep measures every draft of a CUDA engine: leave --threads, --draft, --drafter, "
            "--no-spec and --against out"
        )


def _sweep(
    engine: Path,
    options: SweepOptions,
    given: dict[str, Any],
    *,
    plot: Path | None,
    as_json: bool,
) -> None:
    """Options that are not given keep the plan's own values."""
    from specbuild.cli.bench import sweep as bench_sweep
    from specbuild.cli.bench.table import sweep_tables
    from specbuild.cli.bench.views import VIEW_SWEEP
    from specbuild.cli.terminal import console

    chosen = options.given()
    sweeps = bench_sweep.sweeps_of(chosen.pop("sweep"))
    plan = bench_sweep.SweepPlan(sweeps, **chosen, **given)
    if "retrieved" in chosen and VIEW_SWEEP not in plan.sweeps:
        raise SpecbuildError(f"--retrieved is for --sweep {VIEW_SWEEP}: add it, or leave that out")
    require_plot_place(plot)
    report = bench_sweep.run_sweep(engine, plan)
    if as_json:
        print(console.json_line(report))
    else:
        console.output().print(sweep_tables(report))
    if plot is not None:
        from specbuild.cli.bench.roofline import plot_sweep

        plot_sweep(report, plot)


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


def bench_table(report: BenchReport) -> Table:
    """One column a prompt set."""
    from rich.table import Table

    from specbuild.cli.tables.run_table import histogram_text, milliseconds

    table = Table()
    table.add_column("prompts", style="bold")
    for entry in report.sets:
        table.add_column(entry.name, justify="right", overflow="fold")
    sets = report.sets
    without = [_decimals(entry.without_draft_tokens_per_s, 1) for entry in sets]
    table.add_row("without draft, tokens/s", *without)
    table.add_row(
        "with draft, tokens/s", *(_decimals(entry.with_draft_tokens_per_s, 1) for entry in sets)
    )
    table.add_row("ratio", *(_decimals(entry.ratio, 2) for entry in sets))
    table.add_row("tokens a step", *(_decimals(entry.mean_acceptance_length, 2) for entry in sets))
    if report.against_dtype is not None:
        table.add_row(
            f"with a draft in {report.against_dtype}",
            *(_decimals(entry.acceptance_length_against, 2) for entry in sets),
        )
        table.add_row("tokens a step lost", *map(_acceptance_lost, sets))
    table.add_row(
        "drafts accepted:steps", *(histogram_text(entry.acceptance_histogram) for entry in sets)
    )
    table.add_row(
        "first token without draft", *(milliseconds(entry.ttft_without_draft_s) for entry in sets)
    )
    table.add_row(
        "first token with draft", *(milliseconds(entry.ttft_with_draft_s) for entry in sets)
    )
    table.add_row("same output", *(f"{entry.same_output} of {len(entry.pairs)}" for entry in sets))
    if any(pair.specpv for entry in sets for pair in entry.pairs):
        table.add_row("SpecPV (lossy)", *(specpv_total(entry.pairs) for entry in sets))
    if any(pair.dsa for entry in sets for pair in entry.pairs):
        rows = (dsa_text([pair.dsa for pair in entry.pairs]) for entry in sets)
        table.add_row("DSA (lossy)", *rows)
    return table


def _acceptance_lost(entry: SetReport) -> str:
    own, other = entry.mean_acceptance_length, entry.acceptance_length_against
    if own is None or other is None:
        return "–"
    return f"{other - own:.2f} ({100 * (1 - own / other):.1f} %)"


def specpv_total(pairs: Sequence[Pair]) -> str:
    """Steps and agreement over all pairs, and the worst refresh interval."""
    stats = [pair.specpv for pair in pairs if pair.specpv is not None]
    partial, full = sum(s.partial_steps for s in stats), sum(s.full_steps for s in stats)
    text = f"{partial} partial, {full} full steps"
    tokens = sum(s.rechecked_tokens for s in stats)
    if tokens:
        agreed = sum(s.agreed_tokens for s in stats)
        worst = min(share for s in stats for share in s.agreement_per_interval)
        text += f"; {100 * agreed / tokens:.1f} % agree, {100 * worst:.1f} % in the worst interval"
    failures = sum(s.invariant_failures for s in stats)
    return text + (f"; {failures} invariants failed" if failures else "")


def _decimals(value: float | None, places: int) -> str:
    return "–" if value is None else f"{value:.{places}f}"
