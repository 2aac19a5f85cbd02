"""The tables of docs/comparison.md, from records: JSON files, and lines of text records."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from recorded import RESULTS, decoding, markdown, phase_of, record

STEPS = "h200-2026-11-23/20b-steps.json"
LARGE = "h200-2026-11-23/120b-router-of-8.json"
MANY_ROWS = "h200-2026-11-26/many-rows.txt"
DENSE = "h200-2026-11-26/dense.txt"
DRAFTS = "h200-2026-11-26/drafts.txt"
START = "h100-2026-11-26/first-token.txt"
BATCHES = (1, 4, 16, 64)
_GPT_20B, _GPT_120B, _LLAMA, _QWEN = MODELS = (
    "GPT-OSS 20B", "GPT-OSS 120B", "Llama 3.1 8B", "Qwen3 30B-A3B",
)  # fmt: skip
_NUMBER = r"([\d.]+)"


@dataclass(frozen=True)
class Decoding:
    """Decoding steps of a model without a draft: tokens/s, and the share of a streaming read."""

    tokens_per_s: float
    share: float


def comparison_decoding() -> str:
    """Tokens/s without a draft, and the share of the byte floor, by model and batch size."""

    def rows() -> Iterator[Sequence[str]]:
        for name, (machine, measured) in _measured().items():
            cells = [_cell(measured.get(batch)) for batch in BATCHES]
            yield (name, *cells, machine)

    header = ("", *("1 sequence" if b == 1 else f"{b} sequences" for b in BATCHES), "GPU")
    return markdown(header, rows())


def _cell(result: Decoding | None) -> str:
    return "–" if result is None else f"{result.tokens_per_s:.0f} ({result.share:.0%})"


def _measured() -> Mapping[str, tuple[str, Mapping[int, Decoding]]]:
    steps = {batch: _of_phase(STEPS, batch) for batch in (1, 4)}
    small = steps | _wide_steps("20B, three engines alike")
    large = {1: _of_phase(LARGE, 1)} | _wide_steps("120B")
    return {
        _GPT_20B: ("H200", small),
        _GPT_120B: ("H200", large),
        _LLAMA: ("H200", _llama()),
        _QWEN: ("H100", _qwen()),
    }


def _of_phase(path: str, batch: int) -> Decoding:
    phase = phase_of(path, "no draft", batch, 1000)
    return Decoding(phase["tokens_per_s"], phase["share_of_ceiling"])


def _wide_steps(section: str) -> dict[int, Decoding]:
    """The first engine's lines of a section of the record of steps with many rows."""
    text = _section(MANY_ROWS, section)
    pattern = rf"batch (\d+), context 100\d: {_NUMBER} µs, {_NUMBER} TB/s, {_NUMBER} %"
    result: dict[int, Decoding] = {}
    for batch, time_us, _, percent in re.findall(pattern, text):
        tokens = int(batch) / (float(time_us) * 1e-6)
        result.setdefault(int(batch), Decoding(tokens, float(percent) / 100))
    return {batch: result[batch] for batch in (16, 64)}


def _llama() -> dict[int, Decoding]:
    pattern = rf"no draft +batch (\d+) +context 100\d +{_NUMBER} ms +{_NUMBER} tok/s +{_NUMBER} %"
    text = _section(DENSE, "llama-3.1-8b, bf16").partition("qwen3-8b")[0]
    lines = re.findall(pattern, text)
    return {int(batch): Decoding(float(t), float(p) / 100) for batch, _, t, p in lines}


def _qwen() -> dict[int, Decoding]:
    result = _search(
        DENSE,
        rf"qwen3-30b-a3b, experts in bf16, no draft, context 1000: {_NUMBER} ms at batch 1, "
        rf"{_NUMBER} % of the read; {_NUMBER} ms at batch 16, {_NUMBER} %",
    )
    one_ms, one, many_ms, many = map(float, result.groups())
    return {1: Decoding(1e3 / one_ms, one / 100), 16: Decoding(16e3 / many_ms, many / 100)}


@dataclass(frozen=True)
class Drafted:
    """Return greedy decoding with a simulated draft; ``ratio`` is relative to no draft."""

    model: str
    batch: int
    draft: str
    tokens_per_s: float
    ratio: float
    tokens_per_step: float


def comparison_drafts() -> str:
    """Tokens/s of one sequence and of 16 with a draft, greedy, by its tokens per step."""

    def rows() -> Iterator[Sequence[str]]:
        for row in (*_drafted_20b(), _drafted_120b(), *_drafted_llama()):
            numbers = (f"{row.tokens_per_step:.2f}", f"{row.tokens_per_s:.0f}", f"{row.ratio:.2f}")
            yield (row.model, str(row.batch), row.draft, *numbers)

    header = ("", "sequences", "EAGLE3 draft", "tokens/step", "tokens/s", "ratio to no draft")
    return markdown(header, rows())


def _drafted_20b() -> Iterator[Drafted]:
    for batch in (1, 16):
        plain, row = decoding(batch, "no draft"), decoding(batch, "chain of 3")
        ratio = row["tokens_per_s"] / plain["tokens_per_s"]
        accepted = row["mean_acceptance_length"]
        yield Drafted(_GPT_20B, batch, "chain of 3", row["tokens_per_s"], ratio, accepted)


def _drafted_120b() -> Drafted:
    text = _section(DRAFTS, "120B")
    plain = float(_found(re.search(rf"none +{_NUMBER} tok/s", text))[1])
    row = _found(re.search(rf"chain 2 +{_NUMBER} +{_NUMBER} +{_NUMBER}", text))
    per_s, _, accepted = map(float, row.groups())
    return Drafted(_GPT_120B, 1, "chain of 2", per_s, per_s / plain, accepted)


def _drafted_llama() -> Iterator[Drafted]:
    for batch, length in ((1, 3), (16, 1)):
        result = _search(
            DENSE,
            rf"chain of {length} +batch {batch} +{_NUMBER} tok/s +{_NUMBER} times no draft "
            rf"+{_NUMBER} tokens a step",
        )
        per_s, ratio, accepted = map(float, result.groups())
        yield Drafted(_LLAMA, batch, f"chain of {length}", per_s, ratio, accepted)


def comparison_prompts() -> str:
    """Milliseconds to compute a prompt's first token, offline."""
    files = {
        _GPT_20B: "h200-2026-11-26/20b-prefill.json",
        _GPT_120B: "h200-2026-11-26/120b-prefill.json",
        _LLAMA: "h200-2026-11-26/llama-8b-prefill.json",
    }
    lengths = (512, 2048, 8192)

    def rows() -> Iterator[Sequence[str]]:
        for name, path in files.items():
            phases = [phase_of(path, f"{length} tokens", 1) for length in lengths]
            yield (name, *(f"{phase['time_s'] * 1e3:.0f} ms" for phase in phases), "H200")
        result = _search(DENSE, rf"prompts of 512 and 2048 tokens\s+{_NUMBER} and {_NUMBER} ms")
        yield (_QWEN, *(f"{float(ms):.0f} ms" for ms in result.groups()), "–", "H100")

    return markdown(("", *(f"{length} tokens" for length in lengths), "GPU"), rows())


def comparison_start() -> str:
    """Seconds from the start of a process to its first token, with the files in the page cache."""
    times = rf"{_NUMBER}, {_NUMBER}"
    result = _search(START, rf"H200, four in host +{times} +{times}")
    small, large = result.groups()[:2], result.groups()[2:]

    def rows() -> Iterator[Sequence[str]]:
        for name, pair in ((_GPT_20B, small), (_GPT_120B, large)):
            yield (name, " and ".join(f"{float(second):.2f} s" for second in pair), "H200")

    return markdown(("", "two cold starts", "GPU"), rows())


def comparison_published() -> str:
    """Return the published figures of others."""

    def rows() -> Iterator[Sequence[str]]:
        for entry in record("published.json"):
            source = f"[{entry['by']}]({entry['url']})"
            yield (entry["what"], entry["figures"], source, entry["date"])

    return markdown(("what", "figures", "source", "date"), rows())


TABLES: dict[str, Callable[[], str]] = {
    "comparison-decoding": comparison_decoding,
    "comparison-drafts": comparison_drafts,
    "comparison-prompts": comparison_prompts,
    "comparison-start": comparison_start,
    "comparison-published": comparison_published,
}


def _section(path: str, heading: str) -> str:
    """Return the lines of a text record from the line ``heading`` to the next empty line."""
    text = (RESULTS / path).read_text(encoding="utf-8")
    start = re.search(rf"^{re.escape(heading)}\b.*$", text, re.MULTILINE)
    rest = text[_found(start).end() :]
    return rest.partition("\n\n")[0]


def _search(path: str, pattern: str) -> re.Match[str]:
    return _found(re.search(pattern, (RESULTS / path).read_text(encoding="utf-8")))


def _found(match: re.Match[str] | None) -> re.Match[str]:
    assert match is not None, "a text record has no line of this form"
    return match
