"""``bench modes``: builds missing engines, loads the engine of every mode, and measures them."""

from __future__ import annotations

from pathlib import Path

from specbuild.cli.bench.modes.engines import (
    Mode,
    build_file,
    build_lacking,
    engine_path,
    modes_of,
)
from specbuild.cli.bench.modes.measurement import ModesSettings, measure
from specbuild.cli.bench.modes.report import ModeEngine, ModesReport
from specbuild.cli.bench.modes.show import modes_tables, plot_modes
from specbuild.cli.bench.options import ModeOptions
from specbuild.cli.compare.measurement import cache_bytes_per_token
from specbuild.cli.compare.options import TextOptions
from specbuild.cli.compare.texts import pieces
from specbuild.cli.tables.predicted_memory import predict_memory
from specbuild.cli.terminal import console
from specbuild.cli.terminal.engine_loading import load_engine
from specbuild.cli.terminal.plot_file import require_plot_place
from specbuild.cli.terminal.progress_bar import ProgressBar
from specbuild.runtime.engine import Engine
from specbuild.runtime.errors import SpecbuildError
from specbuild.runtime.settings import RuntimeSettings


def run_modes(
    names: str,
    mode_options: ModeOptions,
    settings: ModesSettings,
    *,
    threads: int | None,
    plot: Path | None,
    as_json: bool,
) -> None:
    """Print the table, or JSON; SpecbuildError if an option or the checkpoint is wrong."""
    require_plot_place(plot)
    modes, options = modes_of(names), build_file(mode_options.build)
    with ProgressBar() as progress:
        built = build_lacking(modes, options, mode_options.engines, progress)
        runtime_settings = RuntimeSettings(threads=threads)
        engines = {
            mode: load_engine(engine_path(mode_options.engines, mode), runtime_settings)
            for mode in modes
        }
        first = engines[modes[0]]
        rows = measure(engines, _text(mode_options.text, first, settings), settings, progress)
    report = ModesReport(
        model=options.model.name,
        backend=first.manifest.backend,
        device=first.manifest.device,
        judged_tokens=settings.judged,
        new_tokens=settings.new_tokens,
        rounds=settings.rounds,
        modes=tuple(_engine(mode, engines[mode], built[mode]) for mode in modes),
        rows=rows,
    )
    if as_json:
        print(console.json_line(report))
    else:
        console.output().print(modes_tables(report))
    if plot is not None:
        plot_modes(report, plot)


def _text(file: Path, engine: Engine, settings: ModesSettings) -> tuple[int, ...]:
    """Return the start of a text: the longest context and the evaluated tokens after it."""
    max_seq_len = engine.manifest.limits.max_seq_len
    if settings.longest > max_seq_len:
        raise SpecbuildError(
            f"--context {max(settings.contexts)} and what follows are {settings.longest} tokens, "
            f"the engines take {max_seq_len}: ask for less, or give the build file a larger "
            "max-seq-len"
        )
    (text,) = pieces(
        TextOptions(files=(file,), tokens=settings.longest), engine, longest=settings.longest
    )
    if len(text) < settings.longest:
        raise SpecbuildError(
            f"--text {file} has {len(text)} tokens, {settings.longest} are read: give a longer one "
            "or smaller contexts"
        )
    return text


def _engine(mode: Mode, engine: Engine, built: bool) -> ModeEngine:
    memory = predict_memory(engine.manifest)
    return ModeEngine(
        mode=mode.name,
        title=mode.title,
        engine=mode.name,
        built=built,
        weights_bytes=memory.weights_bytes,
        cache_bytes_per_token=cache_bytes_per_token(engine.manifest, memory.kv_bytes),
    )
