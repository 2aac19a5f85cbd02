"""The README's figures: its first lines, its tables and its chart."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pictures
from pictures import Axis, Bar
from recorded import DECODING, PREFILL, date_of, decoding, markdown, phase_of, record

STEPS = "h200-2026-11-23/20b-steps-before-the-wait.json"
LARGE = "h200-2026-11-23/120b-router-of-8.json"
LARGE_PREFILL = "h200-2026-11-26/120b-prefill.json"
TRANSFORMERS = "h200-2026-11-23/transformers.json"
ON_CPU = "cpu-2026-11-21.json"
DRAFT_ON_CPU = "cpu-2026-11-29.json"
LLAMA_CPP = ("llama-cpp-2026-11-28-1-threads.json", "llama-cpp-2026-11-28-2-threads.json")


def result() -> str:
    """Return the README's first figures and their conditions, as a list."""
    (vllm,) = record("peers.json")
    ratios = [
        decoding(batch, draft)["tokens_per_s"]
        / vllm["gpt-oss-20b"][f"tokens_per_s{key}"][str(batch)]
        for batch in (1, 16)
        for draft, key in (("no draft", ""), ("chain of 3", "_chain_of_3"))
    ]
    drafted = record(DRAFT_ON_CPU)["figures"]["greedy_default"]
    return (
        f"- **{min(ratios):.1f} to {max(ratios):.1f} times the tokens/s of {vllm['peer']}** on an "
        "H200: GPT-OSS-20B sizes, random weights, a simulated draft, 1 and 16 sequences.\n"
        f"- **{drafted['ratio_median']:.1f} times the tokens/s of no draft** on a CPU: the example "
        "model with its trained draft, greedy decoding, the same tokens.\n"
    )


def speed() -> str:
    """Return the comparison with vLLM, transformers and llama.cpp."""
    header = ("", "specbuild", "compared with", "ratio", "machine", "date")
    rows = (*_beside_vllm(), *_beside_transformers(), *_beside_llama_cpp())
    return markdown(header, iter(rows))


def _beside_vllm() -> Iterator[Sequence[str]]:
    (vllm,) = record("peers.json")
    for batch in (1, 16):
        sequences = "1 sequence" if batch == 1 else f"{batch} sequences"
        for draft, key in (("no draft", ""), ("chain of 3", "_chain_of_3")):
            ours = decoding(batch, draft)["tokens_per_s"]
            theirs = vllm["gpt-oss-20b"][f"tokens_per_s{key}"][str(batch)]
            yield _row(f"20B, {sequences}, {draft}", ours, theirs, vllm, DECODING)
    ours = phase_of(LARGE, "no draft", 1)["tokens_per_s"]
    theirs = vllm["gpt-oss-120b"]["tokens_per_s"]["1"]
    yield _row("120B, 1 sequence, no draft", ours, theirs, vllm, LARGE)
    for size, path in (("20b", PREFILL), ("120b", LARGE_PREFILL)):
        ours = phase_of(path, "8192 tokens", 1)["time_s"] * 1e3
        theirs = vllm[f"gpt-oss-{size}"]["prefill_8192_ms"]
        cells = (f"{ours:.0f} ms", f"{vllm['peer']}: {theirs} ms", f"{theirs / ours:.1f}")
        yield (f"{size.upper()}, prefill of 8192 tokens", *cells, "H200", date_of(path))


def _row(what: str, ours: float, theirs: float, vllm: Any, path: str) -> Sequence[str]:
    cells = (f"{ours:.0f} tokens/s", f"{vllm['peer']}: {theirs}", f"{ours / theirs:.1f}")
    return (what, *cells, "H200", date_of(path))


def _beside_transformers() -> Iterator[Sequence[str]]:
    gpu = record(TRANSFORMERS)
    best = max(run["tokens_per_s"] for run in gpu["runs"])
    ours = gpu["specbuild"]["tokens_per_s"]
    peer = f"transformers {gpu['transformers']}, compiled: {best:.0f}"
    what = "20B, 1 sequence, no draft, offline"
    yield (what, f"{ours:.0f} tokens/s", peer, f"{ours / best:.1f}", "H200", date_of(TRANSFORMERS))
    cpu = record(ON_CPU)
    theirs = cpu["figures"]["transformers"]
    ours = theirs["transformers_tokens_per_s"] * theirs["ratio_median"]
    peer = (
        f"transformers {cpu['versions']['transformers']}: {theirs['transformers_tokens_per_s']:.0f}"
    )
    machine = f"{cpu['processor']}, {cpu['threads']} thread"
    ratio = f"{theirs['ratio_median']:.1f}"
    yield ("example model, no draft", f"{ours:.0f} tokens/s", peer, ratio, machine, cpu["date"])


def _beside_llama_cpp() -> Iterator[Sequence[str]]:
    for path in LLAMA_CPP:
        result = record(path)
        plural = "" if result["threads"] == 1 else "s"
        yield (
            "SmolLM2-135M in Q4_1, no draft",
            f"{result['specbuild_tokens_per_s']:.0f} tokens/s",
            f"llama.cpp: {result['llama_cpp_tokens_per_s']:.0f}",
            f"{result['times_as_fast_as_llama_cpp']:.1f}",
            f"{result['processor']}, {result['threads']} thread{plural}",
            result["date"],
        )


def cpu() -> str:
    """The example model on a CPU, with and without its draft."""
    figures = record(DRAFT_ON_CPU)["figures"]
    names = {
        "greedy_default": "greedy, automatic draft length",
        "greedy_chain_of_3": "greedy, chain of 3",
        "sampled_0.7_default": "temperature 0.7, automatic draft length",
        "sampled_1.0_default": "temperature 1, automatic draft length",
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
    return markdown(header, rows)


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
    row = decoding(batch, draft)
    step = phase_of(STEPS, draft if draft == "no draft" else f"{draft}, whole step", batch)
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
