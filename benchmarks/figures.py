"""Fill the tables of README and docs from benchmarks/results, and draw their pictures.

A table stands between ``<!-- figures: NAME -->`` and ``<!-- end of figures -->``; NAME is one of
``TABLES``.

    .venv/bin/python benchmarks/figures.py
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pictures
from pictures import Axis, Bar, Line

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
TABLE = re.compile(r"(<!-- figures: ([\w-]+) -->\n).*?(<!-- end of figures -->)", re.DOTALL)

DECODING = "h200-2026-11-23/20b-spec.json"
STEPS = "h200-2026-11-23/20b-steps-before-the-wait.json"
PREFILL = "h200-2026-11-26/20b-prefill.json"
LARGE = "h200-2026-11-23/120b-router-of-8.json"
LARGE_PREFILL = "h200-2026-11-26/120b-prefill.json"
TRANSFORMERS = "h200-2026-11-23/transformers.json"
ON_CPU = "cpu-2026-11-21.json"
WIDE_STEPS = "h200-2026-11-23/20b-steps.json"
STREAM = "serve-stream-2026-11-26.json"
QUALITY = "specpv-quality-2026-11-21.json"
BESIDE = ("suffix-beside-eagle3-2026-11-26.json", "suffix-all-prompts-2026-11-26.json")


def record(path: str) -> Any:
    """The JSON record at ``path`` below benchmarks/results."""
    return json.loads((RESULTS / path).read_text(encoding="utf-8"))


def _date(path: str) -> str:
    found = re.search(r"\d{4}-\d\d-\d\d", path)
    assert found, f"no date in the name of {path}"
    return found[0]


def _phase(path: str, name: str, batch: int, context: int = 0) -> dict[str, Any]:
    """The one phase of a sweep with this name and batch, and this context within 1 %."""
    phases = [
        phase
        for phase in record(path)["phases"]
        if (phase["name"], phase["batch"]) == (name, batch)
        and (not context or abs(phase["context"] / context - 1) < 0.01)
    ]
    assert len(phases) == 1, f"{path} has {len(phases)} phases {name!r}, batch {batch}"
    return dict(phases[0])


def _decoding(batch: int, draft: str) -> dict[str, Any]:
    rows = record(DECODING)["decoding"]
    return dict(next(row for row in rows if (row["batch"], row["draft"]) == (batch, draft)))


def _markdown(header: Sequence[str], rows: Iterator[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "".join("| " + " | ".join(line) + " |\n" for line in lines)


def speed() -> str:
    """Return the comparison with vLLM and transformers, of GPT-OSS and of the example."""
    header = ("", "specbuild", "compared with", "ratio", "machine", "date")
    return _markdown(
        header, (row for rows in (_beside_vllm(), _beside_transformers()) for row in rows)
    )


def _beside_vllm() -> Iterator[Sequence[str]]:
    (vllm,) = record("peers.json")
    for batch in (1, 16):
        sequences = "1 sequence" if batch == 1 else f"{batch} sequences"
        for draft, key in (("no draft", ""), ("chain of 3", "_chain_of_3")):
            ours = _decoding(batch, draft)["tokens_per_s"]
            theirs = vllm["gpt-oss-20b"][f"tokens_per_s{key}"][str(batch)]
            yield _row(f"20B, {sequences}, {draft}", ours, theirs, vllm, DECODING)
    ours = _phase(LARGE, "no draft", 1)["tokens_per_s"]
    theirs = vllm["gpt-oss-120b"]["tokens_per_s"]["1"]
    yield _row("120B, 1 sequence, no draft", ours, theirs, vllm, LARGE)
    for size, path in (("20b", PREFILL), ("120b", LARGE_PREFILL)):
        ours = _phase(path, "8192 tokens", 1)["time_s"] * 1e3
        theirs = vllm[f"gpt-oss-{size}"]["prefill_8192_ms"]
        cells = (f"{ours:.0f} ms", f"{vllm['peer']}: {theirs} ms", f"{theirs / ours:.1f}")
        yield (f"{size.upper()}, prefill of 8192 tokens", *cells, "H200", _date(path))


def _row(what: str, ours: float, theirs: float, vllm: Any, path: str) -> Sequence[str]:
    cells = (f"{ours:.0f} tokens/s", f"{vllm['peer']}: {theirs}", f"{ours / theirs:.1f}")
    return (what, *cells, "H200", _date(path))


def _beside_transformers() -> Iterator[Sequence[str]]:
    gpu = record(TRANSFORMERS)
    best = max(run["tokens_per_s"] for run in gpu["runs"])
    ours = gpu["specbuild"]["tokens_per_s"]
    peer = f"transformers {gpu['transformers']}, compiled: {best:.0f}"
    what = "20B, 1 sequence, no draft, offline"
    yield (what, f"{ours:.0f} tokens/s", peer, f"{ours / best:.1f}", "H200", _date(TRANSFORMERS))
    cpu = record(ON_CPU)
    theirs = cpu["figures"]["transformers"]
    ours = theirs["transformers_tokens_per_s"] * theirs["ratio_median"]
    peer = (
        f"transformers {cpu['versions']['transformers']}: {theirs['transformers_tokens_per_s']:.0f}"
    )
    machine = f"{cpu['processor']}, {cpu['threads']} thread"
    ratio = f"{theirs['ratio_median']:.1f}"
    yield ("example model, no draft", f"{ours:.0f} tokens/s", peer, ratio, machine, cpu["date"])


def cpu() -> str:
    """The example model on a CPU, with and without its draft."""
    figures = record(ON_CPU)["figures"]
    names = {
        "greedy_default": "greedy, automatic draft length",
        "greedy_chain_of_3": "greedy, chain of 3",
        "sampled_0.8_default": "temperature 0.8, automatic draft length",
    }
    header = ("40 held-out prompts, 256 tokens", "no draft", "with draft", "ratio", "tokens/step")
    rows = (
        (
            name,
            f"{figures[key]['plain_tokens_per_s']:.0f} tokens/s",
            f"{figures[key]['draft_tokens_per_s']:.0f} tokens/s",
            f"{figures[key]['ratio_median']:.2f}",
            f"{figures[key]['mean_acceptance_length']:.2f}",
        )
        for key, name in names.items()
    )
    return _markdown(header, rows)


def chains() -> str:
    """Decoding of 20B geometry by the draft's length."""

    def rows() -> Iterator[Sequence[str]]:
        for draft in ("no draft", *(f"chain of {length}" for length in range(1, 5))):
            one, many = _decoding(1, draft), _decoding(16, draft)
            speeds = [f"{row['tokens_per_s']:.0f} ({row['ratio']:.2f})" for row in (one, many)]
            yield (draft, f"{one['mean_acceptance_length']:.2f}", *speeds)

    return _markdown(("", "tokens/step", "1 sequence", "16 sequences"), rows())


LONG = (
    (8192, 1, "h200-2026-11-23/specpv-8k-32k.json"),
    (8192, 8, "h200-2026-11-23/specpv-8k-32k.json"),
    (32768, 1, "h200-2026-11-23/specpv-8k-32k.json"),
    (32768, 8, "h200-2026-11-23/specpv-32k-batch-8.json"),
    (131072, 1, "h200-2026-11-23/specpv-131k.json"),
    (131072, 8, "h200-2026-11-23/specpv-131k.json"),
)


def drafters() -> str:
    """EAGLE3, suffix decoding and what pays, on prompts that repeat and on any."""
    header = ("drafter", "repetitive text", "tokens/step", "mixed text", "tokens/step")
    found = [record(path) for path in BESIDE]
    rows = {name: [entry[name] for entry in found] for name in ("eagle3", "suffix", "auto")}
    return _markdown(header, (_of_drafter(name, entries) for name, entries in rows.items()))


def _of_drafter(name: str, entries: Sequence[dict[str, float]]) -> Sequence[str]:
    keys = ("ratio", "tokens_a_step")
    return f"`{name}`", *(f"{entry[key]:.2f}" for entry in entries for key in keys)


def specpv() -> str:
    """What partial views of 4096 tokens gain, by context and batch."""

    def rows() -> Iterator[Sequence[str]]:
        for context, batch, path in LONG:
            whole = _phase(path, "whole", batch, context)
            part = _phase(path, "partial, 4096 tokens retrieved", batch, context)
            mix = _phase(path, "mix, 4096 tokens retrieved", batch, context)
            times = [f"{phase['time_s'] * 1e3:.2f} ms" for phase in (whole, part, mix)]
            speeds = [f"{phase['tokens_per_s']:.0f}" for phase in (whole, mix)]
            ratio = mix["tokens_per_s"] / whole["tokens_per_s"]
            yield (str(context), str(batch), *times, *speeds, f"{ratio:.2f}")

    header = ("context", "sequences", "full step", "partial step", "mean with refreshes")
    return _markdown((*header, "tokens/s, full steps", "tokens/s, SpecPV", "ratio"), rows())


def specpv_quality() -> str:
    """How often a view says what the whole cache says: the example model reading held-out text."""

    def rows() -> Iterator[Sequence[str]]:
        for row in record(QUALITY):
            if row["from"] == 3072 and row["correction"] == "none":
                same, error = 100 * row["same"], 100 * row["same_error"]
                added = row["loss"] - row["loss_whole"]
                share = f"{row['budget']} of {row['blocks']:.0f}"
                yield (share, f"{same:.1f} ± {error:.1f} %", f"{added:.3f} nats")

    return _markdown(("retrieved blocks", "same token", "increase in loss"), rows())


BOTH = "h200-2026-11-23/20b-131k-indexer-64-fp8.json"
CACHES = (
    (8192, "h200-2026-11-23/20b-latent-{}-stored-keys.json"),
    (32768, "h200-2026-11-23/20b-latent-{}-stored-keys.json"),
    (131072, "h200-2026-11-23/20b-131k-latent-{}.json"),
)


def caches() -> str:
    """Milliseconds of a step without a draft, by what is cached and attended to."""

    def rows() -> Iterator[Sequence[str]]:
        for context, latents in CACHES:
            for batch in (1, 8):
                phases = (
                    _phase(BOTH, "no draft", batch, context),
                    _phase(BOTH, "no draft, chosen tokens", batch, context),
                    _phase(latents.format(512), "no draft", batch, context),
                    _phase(latents.format(256), "no draft", batch, context),
                )
                times = [f"{phase['time_s'] * 1e3:.2f} ms" for phase in phases]
                yield (str(context), str(batch), *times)

    header = ("context", "sequences", "keys and values", "DSA, top 2048")
    return _markdown((*header, "latents, width 512", "latents, width 256"), rows())


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

    return _markdown(("", "factorized", "trained"), rows())


def growth() -> str:
    """Requests of 512 + 128 tokens a second, on paper: what each rate takes.

    A GPU decodes 64 sequences without a draft, and reads prompts four to a launch in between; the
    streams open at once are those of all GPUs (Little's law: a GPU's 64 over its rate).
    """
    prompt, output, batch = 512, 128, 64
    launch = _phase(PREFILL, "2048 tokens", 1)
    step_s = _phase(WIDE_STEPS, "no draft", batch)["time_s"]
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

    return _markdown(header, rows())


TABLES: dict[str, Callable[[], str]] = {
    "speed": speed,
    "cpu": cpu,
    "chains": chains,
    "drafters": drafters,
    "specpv": specpv,
    "specpv-quality": specpv_quality,
    "caches": caches,
    "heads": heads,
    "growth": growth,
}


def bars(batch: int) -> list[Bar]:
    """Peers and specbuild at ``batch`` sequences, 20B geometry on an H200."""
    (vllm,) = record("peers.json")
    theirs = vllm["gpt-oss-20b"]
    gpu = record(TRANSFORMERS)
    peers = [
        Bar("vLLM 0.26", theirs["tokens_per_s"][str(batch)]),
        Bar("vLLM 0.26, EAGLE3", theirs["tokens_per_s_chain_of_3"][str(batch)]),
    ]
    if batch == 1:
        best = max(run["tokens_per_s"] for run in gpu["runs"])
        peers.insert(0, Bar("transformers", best))
    return [*peers, _ours(batch, "no draft"), _ours(batch, "chain of 3")]


def _ours(batch: int, draft: str) -> Bar:
    row = _decoding(batch, draft)
    step = _phase(STEPS, draft if draft == "no draft" else f"{draft}, whole step", batch)
    tokens = batch * row["mean_acceptance_length"]
    floor = record(DECODING)["ceiling_bytes_per_s"] * tokens / step["bytes_total"]
    label = "specbuild" if draft == "no draft" else "specbuild, EAGLE3"
    return Bar(label, row["tokens_per_s"], ours=True, floor=floor)


def speed_picture() -> str:
    """Return the chart of the README."""
    parts: list[str] = []
    top = 18
    for batch, title in ((1, "1 sequence"), (16, "16 sequences")):
        panel = bars(batch)
        high = max(bar.floor or bar.tokens_per_s for bar in panel)
        step = 500 if high < 5000 else 5000
        ticks = [(value, str(value)) for value in range(0, int(high) + 1, step)]
        axis = Axis("tokens/s", 0, high, ticks)
        parts += pictures.bars(title, panel, axis, top)
        top += pictures.bars_height(len(panel))
    notes = (
        "GPT-OSS-20B sizes, random weights, simulated draft (chain of 3), one H200.",
        "Dashed: the limit set by memory bandwidth.",
    )
    for line, note in enumerate(notes):
        parts.append(f'<text x="0" y="{top - 8 + 15 * line}">{note}</text>')
    return pictures.svg(top + 15, parts)


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
        _phase(path, name, batch, context)["time_s"]
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
    return TABLE.sub(lambda found: f"{found[1]}{TABLES[found[2]]()}{found[3]}", text)


def documents() -> list[Path]:
    """Return the pages that may have tables."""
    return [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


if __name__ == "__main__":
    for document in documents():
        document.write_text(filled(document.read_text(encoding="utf-8")), encoding="utf-8")
    for file, picture in PICTURES.items():
        file.write_text(picture(), encoding="utf-8")
