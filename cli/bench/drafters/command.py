"""``bench drafters``: loads the engine, reads a text, and measures every drafter in turn."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from specbuild.cli.bench.drafters.measurement import DraftersSettings, Ids, measure
from specbuild.cli.bench.drafters.report import DraftersReport
from specbuild.cli.bench.drafters.show import drafters_table, plot_drafters
from specbuild.cli.terminal import console
from specbuild.cli.terminal.engine_loading import load_engine
from specbuild.cli.terminal.plot_file import require_plot_place
from specbuild.cli.terminal.progress_bar import ProgressBar
from specbuild.cli.terminal.prompt_file import read_prompt_file, tokenised
from specbuild.runtime.engine import Engine
from specbuild.runtime.errors import SpecbuildError
from specbuild.runtime.request import GenerateParams
from specbuild.runtime.settings import PrefillSchedule, RuntimeSettings

_SEED = 1
_SHORT = 128


def run_drafters(
    engine: Path,
    prompts: Sequence[Path],
    settings: DraftersSettings,
    *,
    threads: int | None,
    plot: Path | None,
    as_json: bool,
) -> None:
    """Print the table, or JSON; SpecbuildError if the engine does not support the sizes."""
    require_plot_place(plot)
    # All prompts are prefilled first, so that full batches are timed.
    prefill = PrefillSchedule(steps_between=0)
    loaded = load_engine(engine, RuntimeSettings(threads=threads, prefill=prefill))
    settings = _filled(settings, loaded)
    settings.check(loaded)
    name, text = _text(loaded, prompts, max(settings.contexts))
    with ProgressBar() as progress:
        rows = measure(loaded, text, settings, progress)
    manifest = loaded.manifest
    report = DraftersReport(
        manifest.backend, manifest.device, name, settings.new_tokens, settings.rounds, rows
    )
    if as_json:
        print(console.json_line(report))
    else:
        console.output().print(drafters_table(report))
    if plot is not None:
        plot_drafters(report, plot)


def _filled(settings: DraftersSettings, engine: Engine) -> DraftersSettings:
    """Return the settings, by default with the engine's own batches and contexts."""
    limits = engine.manifest.limits
    longest = max(1, limits.max_seq_len - settings.new_tokens)
    batches = settings.batches or tuple(dict.fromkeys((1, limits.max_batch_size)))
    contexts = settings.contexts or tuple(
        dict.fromkeys((min(_SHORT, longest), min(limits.max_seq_len // 2, longest)))
    )
    return DraftersSettings(batches, contexts, settings.new_tokens, settings.rounds)


def _text(engine: Engine, files: Sequence[Path], longest: int) -> tuple[str, Ids]:
    """Return the text of the sequences: the prompts of a file concatenated, or random tokens."""
    if not files:
        vocab = engine.manifest.target.vocab
        ids = np.random.default_rng(_SEED).integers(0, vocab, 2 * longest)
        return "random tokens", tuple(ids.tolist())
    params = GenerateParams(raw=True)
    token_ids: list[int] = []
    for file in files:
        for prompt in tokenised(engine, read_prompt_file(file), params):
            token_ids += prompt.prompt_ids or ()
    if len(token_ids) < longest:
        raise SpecbuildError(
            f"--prompts {files[0]}: {len(token_ids)} tokens, a context has {longest}: give more "
            "or request a smaller --context"
        )
    return ", ".join(file.stem for file in files), tuple(token_ids)
