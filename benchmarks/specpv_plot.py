"""The picture of docs/long-context.md: what partial views gain and what they cost, against context.

Speed is that of ``bench --sweep specpv --json``, the later file's where several have a row; the
quality is that of ``specpv_quality.py --output``. The same files give the same bytes.

    .venv/bin/python benchmarks/specpv_plot.py --output docs/specpv.svg \\
      --speed benchmarks/results/h200-2026-11-23/specpv-8k-32k.json \\
      --speed benchmarks/results/h200-2026-11-23/specpv-32k-batch-8.json \\
      --speed benchmarks/results/h200-2026-11-23/specpv-131k.json \\
      --quality benchmarks/results/specpv-quality-2026-11-21.json
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLOURS = ("#0e7c86", "#c2571a", "#6b4fa0", "#9aa5b1", "#1f2933", "#b3892b")
WHOLE = "whole"

# Seconds of a step by its name, batch and context.
Place = tuple[str, int, float]
Times = Mapping[Place, float]


def times_of(reports: Sequence[Mapping[str, Any]]) -> dict[Place, float]:
    """Seconds by a phase's name, batch and context; a later report's row counts."""
    found: dict[Place, float] = {}
    for report in reports:
        for phase in report["phases"]:
            place = (phase["name"], phase["batch"], phase["context"])
            found[_near(found, place)] = phase["time_s"]
    return found


def _near(found: Times, place: Place) -> Place:
    """The place of the same phase and batch at a context within 1 %, else this place."""
    name, batch, context = place
    for known in found:
        if known[:2] == (name, batch) and abs(known[2] - context) <= 0.01 * context:
            return known
    return place


def gains(times: Times, name: str) -> dict[tuple[str, int], list[tuple[float, float]]]:
    """How many times faster than whole steps those of this name are, and at which contexts.

    By what a row's name has behind this one, which says its tree (nothing for a chain), and batch.
    """
    found: dict[tuple[str, int], list[tuple[float, float]]] = {}
    for (phase, batch, context), time_s in sorted(times.items()):
        if not phase.startswith(name):
            continue
        tree = phase.removeprefix(name)
        whole = times.get(_near(times, (f"{WHOLE}{tree}", batch, context)))
        if whole:
            found.setdefault((tree, batch), []).append((context, whole / time_s))
    return found


def agreements(
    rows: Sequence[Mapping[str, Any]],
) -> dict[int, list[tuple[float, float, float]]]:
    """By budget: middles of the contexts' ranges, shares of the same token, standard errors."""
    found: dict[int, list[tuple[float, float, float]]] = {}
    for row in rows:
        if row["correction"] == "none":
            middle = (row["from"] + row["to"]) / 2
            point = (middle, row["same"], row["same_error"])
            found.setdefault(row["budget"], []).append(point)
    return found


def _draw_gains(axes: Axes, times: Times, retrieved: int) -> None:
    """A line for each batch: the mix with a chain and with a tree, a chain's partial steps."""
    mixes, partials = (
        gains(times, f"{kind}, {retrieved} tokens retrieved") for kind in ("mix", "partial")
    )
    trees = sorted({tree for tree, _ in mixes} - {""})
    lines = [("-", "mix of steps", "", mixes), ("--", "partial steps alone", "", partials)]
    lines += [(":", f"mix{tree}", tree, mixes) for tree in trees]
    batches = sorted({batch for _, batch in (*mixes, *partials)})
    for style, label, tree, found in lines:
        for at, batch in enumerate(batches):
            if (tree, batch) in found:
                axes.plot(
                    *zip(*found[tree, batch], strict=True),
                    style, marker="o", markersize=4, color=COLOURS[at % len(COLOURS)],
                    label=f"batch {batch}, {label}",
                )  # fmt: skip


def draw(
    times: Times,
    quality: Mapping[int, Sequence[tuple[float, float, float]]],
    file: Path,
    *,
    retrieved: int,
) -> None:
    """Write an SVG of two panels."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    # Letters stay letters: a tenth of the bytes of their outlines.
    mpl.rcParams |= {"svg.hashsalt": "specbuild", "svg.fonttype": "none"}
    figure = Figure(figsize=(9.6, 3.6), layout="constrained")
    gain, same = figure.subplots(1, 2)
    _draw_gains(gain, times, retrieved)
    gain.axhline(1, color="#9aa5b1", linewidth=1)
    gain.set_xscale("log")
    contexts = sorted({round(context / 1024) * 1024 for _, _, context in times})
    gain.set_xticks(contexts, [f"{context // 1000}k" for context in contexts])
    gain.minorticks_off()
    gain.set_ylim(bottom=0)
    gain.set_xlabel("context, tokens (20B geometry, H200)")
    gain.set_ylabel("speed, times that of whole steps")
    gain.set_title(f"Speed, {retrieved} tokens retrieved", fontsize=10)
    for colour, (budget, points) in zip(COLOURS, sorted(quality.items()), strict=False):
        contexts, shares, errors = zip(*points, strict=True)
        same.errorbar(
            contexts, [100 * s for s in shares], [100 * e for e in errors],
            marker="o", capsize=2, color=colour, label=f"{budget} blocks",
        )  # fmt: skip
    same.set_xlabel("context, tokens (example model, held-out text)")
    same.set_ylabel("same token as over everything, %")
    same.set_title("Agreement, with standard errors", fontsize=10)
    for axes in (gain, same):
        axes.grid(visible=True, alpha=0.2)
    if times:
        gain.legend(fontsize=6.5, loc="lower right", labelspacing=0.3, handlelength=3)
    same.legend(fontsize=8, loc="upper left", bbox_to_anchor=(1, 1))
    figure.savefig(file, format="svg", metadata={"Date": None})


def main() -> None:
    """Read the reports, draw."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--speed", type=Path, action="append", default=[], metavar="FILE.json")
    parser.add_argument("--quality", type=Path, required=True, metavar="FILE.json")
    parser.add_argument("--retrieved", type=int, default=4096, help="tokens that views retrieve")
    parser.add_argument("--output", type=Path, required=True, metavar="FILE.svg")
    given = parser.parse_args()
    reports = [json.loads(file.read_text(encoding="utf-8")) for file in given.speed]
    rows = json.loads(given.quality.read_text(encoding="utf-8"))
    draw(times_of(reports), agreements(rows), given.output, retrieved=given.retrieved)


if __name__ == "__main__":
    main()
