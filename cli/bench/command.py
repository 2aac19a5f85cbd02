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
from specbuild.cli.bench.pair_table import bench_table
from specbuild.cli.bench.server.command import bench_server
from specbuild.cli.options.derived import takes_options
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
from specbuild.cli.terminal.plot_file import require_plot_place
from specbuild.runtime.errors import SpecbuildError

if TYPE_CHECKING:
    from specbuild.cli.bench.pairs import BenchPlan, BenchReport, PromptSet
    from specbuild.runtime.engine import Engine
    from specbuild.runtime.request import GenerateParams

_RANDOM_SEED = 1
# What --modes measures behind, where no --context is given.
MODE_CONTEXTS = (512, 1536)


@takes_options
def bench(
    engine: Annotated[
        Path | None,
        typer.Argument(metavar="[ENGINE]", help="Engine directory.", callback=suggest_neighbour),
    ] = None,
    *,
    prompts: Annotated[
        list[Path] | None,
        typer.Option(
            "--prompts",
            metavar="FILE.jsonl",
            help="Prompt set, reported separately; repeatable.",
            rich_help_panel="Measurement",
        ),
    ] = None,
    max_new_tokens: Annotated[
        int,
        typer.Option(
            "--max-new-tokens",
            metavar="N",
            min=2,
            help="Tokens per output.",
            rich_help_panel="Measurement",
        ),
    ] = 128,
    rounds: Annotated[
        int,
        typer.Option(
            "--rounds",
            metavar="N",
            min=1,
            help="Measured pairs per prompt.",
            rich_help_panel="Measurement",
        ),
    ] = 3,
    raw: Annotated[
        bool,
        typer.Option(
            "--raw",
            help="Do not apply the chat template.",
            rich_help_panel="Measurement",
        ),
    ] = False,
    plot: Annotated[
        Path | None,
        typer.Option(
            "--plot", metavar="FILE.svg", help="Also write a chart.", rich_help_panel="Report"
        ),
    ] = None,
    against: Annotated[
        Path | None,
        typer.Option(
            "--against",
            metavar="FILE.json",
            help="Compare the acceptance with this report of another engine.",
            rich_help_panel="Report",
        ),
    ] = None,
    drafters: Annotated[
        bool,
        typer.Option(
            "--drafters",
            help="Compare the engine's drafters by --batch and --context.",
            rich_help_panel="Measurement",
        ),
    ] = False,
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
    """Measure decoding speed and acceptance, with and without the draft.

    Each prompt is decoded greedily both ways, one directly after the other, in
    alternating order. Results are medians over these pairs. With [b]--no-spec[/b] only
    decoding without the draft is measured. Without [b]--prompts[/b] the prompts are random
    tokens, which no draft can predict.

    [b]--against[/b] compares with the output of [b]bench --json[/b] for an engine with another
    [b]--draft-dtype[/b], with the same prompts and draft options.

    [b]--sweep[/b] measures phases of a CUDA engine, and compares each with the bytes that it
    must read and a streaming read. [b]--sweep anatomy[/b] shows each launch of a step.

    [b]--suite[/b] checks scenarios against thresholds; the exit code is 1 if one is missed.

    [b]--modes[/b] builds engines of one checkpoint without a draft, with one, and with SpecPV,
    latents and DSA. It compares speed, cache size and fidelity by context.

    [b]--drafters[/b] compares no draft, each of the engine's drafters, and automatic
    selection. [b]--prompts[/b] are concatenated to one text.

    [b]--server[/b] measures a server with OpenAI's API: TTFT and inter-token latency as
    seen by clients.

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
    if drafters:
        beside = bool(tree.given() or suite.given() or against or no_spec or drafter or draft_tree)
        _refuse_beside_drafters(beside or sweep.sweep is not None or raw)
        told = dict(threads=threads, plot=plot, as_json=as_json)
        _drafters(engine, prompts or (), sweep, (max_new_tokens, rounds), told)
        return
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
    from specbuild.cli.bench.pairs import BenchPlan
    from specbuild.cli.terminal.engine_loading import load_engine
    from specbuild.runtime.settings import PrefillSchedule, RuntimeSettings

    require_plot_place(plot)
    other = None if against is None else bench_against.read_report(against)
    # Full batches are timed: all prompts are prefilled first.
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
    plan = BenchPlan(max_new_tokens, rounds, setting, raw)
    report = _measured(loaded, plan, prompts or [])
    if other is not None:
        report = bench_against.against(report, other)
    _tell(report, plot, as_json=as_json)


def _measured(engine: Engine, plan: BenchPlan, files: Sequence[Path]) -> BenchReport:
    from specbuild.cli.bench.pairs import measure
    from specbuild.cli.terminal.progress_bar import ProgressBar

    sets = _prompt_sets(engine, files, plan.params)
    with ProgressBar() as progress:
        return measure(engine, sets, plan, progress)


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


def _refuse_beside_drafters(given: bool) -> None:
    if given:
        raise SpecbuildError(
            "--drafters measures all of them, chains as they pay: leave --sweep, --suite, --draft, "
            "--drafter, --no-spec, --raw and --against out"
        )


def _drafters(
    engine: Path,
    prompts: Sequence[Path],
    sweep: SweepOptions,
    lengths: tuple[int, int],
    told: dict[str, Any],
) -> None:
    if set(sweep.given()) - {"batches", "contexts"}:
        raise SpecbuildError("of --sweep's options --drafters takes --batch and --context alone")
    from specbuild.cli.bench.drafters.command import bench_drafters
    from specbuild.cli.bench.drafters.measurement import DraftersPlan

    plan = DraftersPlan(sweep.batches, sweep.contexts, *lengths)
    bench_drafters(engine, prompts, plan, **told)


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
        raise SpecbuildError(
            f"--retrieved is for --sweep {VIEW_SWEEP}: add it, or omit --retrieved"
        )
    require_plot_place(plot)
    report = bench_sweep.run_sweep(engine, plan)
    if as_json:
        print(console.json_line(report))
    else:
        console.output().print(sweep_tables(report))
    if plot is not None:
        if report.phases or not report.anatomies:
            from specbuild.cli.bench.roofline import plot_sweep

            plot_sweep(report, plot)
        else:
            from specbuild.cli.anatomy.timeline import plot_anatomies

            plot_anatomies(report.anatomies, plot, engine=f"{report.engine} on {report.gpu}")


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
