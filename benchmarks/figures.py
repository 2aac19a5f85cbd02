"""Fill the tables of README and docs from benchmarks/results, and draw their pictures.

A table stands between ``<!-- figures: NAME -->`` and ``<!-- end of figures -->``; NAME is one of
``TABLES``.

    .venv/bin/python benchmarks/figures.py
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import comparison
import pictures
from pictures import Axis, Line
from readme_figures import cpu, result, speed, speed_picture
from recorded import PREFILL, ROOT, decoding, markdown, phase_of, record

TABLE = re.compile(r"(<!-- figures: ([\w-]+) -->\n).*?(<!-- end of figures -->)", re.DOTALL)

WIDE_STEPS = "h200-2026-11-23/20b-steps.json"
STREAM = "serve-stream-2026-11-26.json"
QUALITY = "specpv-quality-2026-11-21.json"
BESIDE = ("suffix-beside-eagle3-2026-11-26.json", "suffix-all-prompts-2026-11-26.json")


def chains() -> str:
    """Decoding of 20B geometry by the draft's length."""

    def rows() -> Iterator[Sequence[str]]:
        for draft in ("no draft", *(f"chain of {length}" for length in range(1, 5))):
            one, many = decoding(1, draft), decoding(16, draft)
            speeds = [f"{row['tokens_per_s']:.0f} ({row['ratio']:.2f})" for row in (one, many)]
            yield (draft, f"{one['mean_acceptance_length']:.2f}", *speeds)

    return markdown(("", "tokens/step", "1 sequence", "16 sequences"), rows())


LONG = (
    (8192, 1, "h200-2026-11-23/specpv-8k-32k.json"),
    (8192, 8, "h200-2026-11-23/specpv-8k-32k.json"),
    (32768, 1, "h200-2026-11-23/specpv-8k-32k.json"),
    (32768, 8, "h200-2026-11-23/specpv-32k-batch-8.json"),
    (131072, 1, "h200-2026-11-23/specpv-131k.json"),
    (131072, 8, "h200-2026-11-23/specpv-131k.json"),
)


def drafters() -> str:
    """EAGLE3, suffix decoding and automatic selection, on repetitive and other prompts."""
    header = ("drafter", "repetitive text", "tokens/step", "mixed text", "tokens/step")
    result = [record(path) for path in BESIDE]
    rows = {name: [entry[name] for entry in result] for name in ("eagle3", "suffix", "auto")}
    return markdown(header, (_of_drafter(name, entries) for name, entries in rows.items()))


def _of_drafter(name: str, entries: Sequence[dict[str, float]]) -> Sequence[str]:
    keys = ("ratio", "tokens_a_step")
    return f"`{name}`", *(f"{entry[key]:.2f}" for entry in entries for key in keys)


def specpv() -> str:
    """What partial views of 4096 tokens gain, by context and batch."""

    def rows() -> Iterator[Sequence[str]]:
        for context, batch, path in LONG:
            whole = phase_of(path, "whole", batch, context)
            part = phase_of(path, "partial, 4096 tokens retrieved", batch, context)
            mix = phase_of(path, "mix, 4096 tokens retrieved", batch, context)
            times = [f"{phase['time_s'] * 1e3:.2f} ms" for phase in (whole, part, mix)]
            speeds = [f"{phase['tokens_per_s']:.0f}" for phase in (whole, mix)]
            ratio = mix["tokens_per_s"] / whole["tokens_per_s"]
            yield (str(context), str(batch), *times, *speeds, f"{ratio:.2f}")

    header = ("context", "sequences", "full step", "partial step", "mean with refreshes")
    return markdown((*header, "tokens/s, full steps", "tokens/s, SpecPV", "ratio"), rows())


def specpv_quality() -> str:
    """Agreement of views with the full cache: the example model on held-out text."""

    def rows() -> Iterator[Sequence[str]]:
        for row in record(QUALITY):
            if row["from"] == 3072 and row["correction"] == "none":
                same, error = 100 * row["same"], 100 * row["same_error"]
                added = row["loss"] - row["loss_whole"]
                share = f"{row['budget']} of {row['blocks']:.0f}"
                yield (share, f"{same:.1f} ± {error:.1f} %", f"{added:.3f} nats")

    return markdown(("retrieved blocks", "same token", "increase in loss"), rows())


BOTH = "h200-2026-11-23/20b-131k-indexer-64-fp8.json"
CACHES = (
    (8192, "h200-2026-11-23/20b-latent-{}-stored-keys.json"),
    (32768, "h200-2026-11-23/20b-latent-{}-stored-keys.json"),
    (131072, "h200-2026-11-23/20b-131k-latent-{}.json"),
)


def caches() -> str:
    """Milliseconds of a step without a draft, by cache contents and attention."""

    def rows() -> Iterator[Sequence[str]]:
        for context, latents in CACHES:
            for batch in (1, 8):
                phases = (
                    phase_of(BOTH, "no draft", batch, context),
                    phase_of(BOTH, "no draft, chosen tokens", batch, context),
                    phase_of(latents.format(512), "no draft", batch, context),
                    phase_of(latents.format(256), "no draft", batch, context),
                )
                times = [f"{phase['time_s'] * 1e3:.2f} ms" for phase in phases]
                yield (str(context), str(batch), *times)

    header = ("context", "sequences", "keys and values", "DSA, top 2048")
    return markdown((*header, "latents, width 512", "latents, width 256"), rows())


def heads() -> str:
    """Perplexity of the example model with latents and with indexers."""

    def rows() -> Iterator[Sequence[str]]:
        judged = record("example-heads.json")
        for row in judged["latents"]:
            base = judged["without"]["latents"]
            cells = [
                f"{row[form]} ({row[form] / base - 1:+.1%})" if form in row else ""
                for form in ("factorised", "trained")
            ]
            yield (f"latents: {row['cache']} of the cache", *cells)
        for row in judged["indexers"]:
            change = row["perplexity"] / judged["without"]["indexers"] - 1
            what = f"indexers: {row['tokens']} of {row['of']} tokens"
            yield (what, "", f"{row['perplexity']} ({change:+.1%})")

    return markdown(("", "factorized", "trained"), rows())


def growth() -> str:
    """Requests of 512 + 128 tokens per second, computed: the needs of each rate.

    A GPU decodes 64 sequences without a draft, and prefills prompts in between, four per launch.
    The number of concurrent streams is that of all GPUs (Little's law: a GPU's 64 divided by its
    rate).
    """
    prompt, output, batch = 512, 128, 64
    launch = phase_of(PREFILL, "2048 tokens", 1)
    step_s = phase_of(WIDE_STEPS, "no draft", batch)["time_s"]
    request_s = launch["time_s"] * prompt / launch["rows"] + output * step_s / batch
    stream = record(STREAM)
    header = ("requests/s", "GPUs", "concurrent streams", "tokens/s", "network, Gbit/s")

    def rows() -> Iterator[Sequence[str]]:
        for rate in (1, 100, 1000, 10_000, 100_000):
            gpus = rate * request_s
            tokens = rate * output
            gbit = tokens * stream["body_bytes"] / stream["tokens"] * 8 / 1e9
            streams = gpus * batch
            texts = (f"{gpus:.{0 if gpus > 10 else 3}f}", f"{streams:.0f}", f"{tokens}")
            yield (f"{rate}", *texts, f"{gbit:.{1 if gbit > 0.1 else 4}f}")

    return markdown(header, rows())


TABLES: dict[str, Callable[[], str]] = {
    "result": result,
    "speed": speed,
    "cpu": cpu,
    "chains": chains,
    "drafters": drafters,
    "specpv": specpv,
    "specpv-quality": specpv_quality,
    "caches": caches,
    "heads": heads,
    "growth": growth,
    **comparison.TABLES,
}


def specpv_picture() -> str:
    """Return the chart of docs/long-context.md: speed and agreement of partial views by context."""
    speeds = []
    for colour, batch in zip(pictures.COLOURS, (1, 8), strict=False):
        paths = [(context, path) for context, size, path in LONG if size == batch]
        sequences = "1 sequence" if batch == 1 else f"{batch} sequences"
        for kind, name in (("mix", sequences), ("partial", f"{sequences}, partial")):
            points = [(context, _gain(path, kind, batch, context)) for context, path in paths]
            speeds.append(Line(name, points, colour, dashed=kind == "partial"))
    across = Axis("context, tokens (20B sizes, H200)", 7000, 150000, CONTEXTS, logarithmic=True)
    up = Axis("speedup", 0, 2.5, [(tenths / 10, f"{tenths / 10}") for tenths in TENTHS])
    title = "Speedup over full steps (partial: without refreshes)"
    parts = list(pictures.lines(title, speeds, across, up, 18))
    budgets = zip(pictures.COLOURS, (4, 16, 64, 128), strict=False)
    agreed = [Line(f"{budget} blocks", _agreed(budget), colour) for colour, budget in budgets]
    ticks = [(context, str(context)) for context in range(500, 4000, 500)]
    across = Axis("context, tokens (example model, held-out text)", 500, 3700, ticks)
    up = Axis("same token, %", 85, 100, [(share, str(share)) for share in (85, 90, 95, 100)])
    title = "Same token with a partial view and with the full cache"
    parts += pictures.lines(title, agreed, across, up, 278)
    return pictures.svg(518, parts)


CONTEXTS = ((8192, "8k"), (32768, "32k"), (131072, "131k"))
TENTHS = (0, 5, 10, 15, 20, 25)


def _gain(path: str, kind: str, batch: int, context: int) -> float:
    steps = [
        phase_of(path, name, batch, context)["time_s"]
        for name in ("whole", f"{kind}, 4096 tokens retrieved")
    ]
    return float(steps[0] / steps[1])


def _agreed(budget: int) -> list[tuple[float, float]]:
    return [
        ((row["from"] + row["to"]) / 2, 100 * row["same"])
        for row in record(QUALITY)
        if row["budget"] == budget and row["correction"] == "none"
    ]


PICTURES: dict[Path, Callable[[], str]] = {
    ROOT / "docs" / "speed.svg": speed_picture,
    ROOT / "docs" / "specpv.svg": specpv_picture,
}


def filled(text: str) -> str:
    """Return ``text`` with every marked table replaced."""
    return TABLE.sub(lambda result: f"{result[1]}{TABLES[result[2]]()}{result[3]}", text)


def documents() -> list[Path]:
    """Return the pages that may have tables."""
    return [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


if __name__ == "__main__":
    for document in documents():
        document.write_text(filled(document.read_text(encoding="utf-8")), encoding="utf-8")
    for file, picture in PICTURES.items():
        file.write_text(picture(), encoding="utf-8")
