"""The sweep as a roofline: the rate of each phase, by operations per byte read."""

from __future__ import annotations

from pathlib import Path

from specbuild.builder.svg import GREY, SERIES, save_svg
from specbuild.cli.bench.report import SweepReport

# Names of sweeps with phases.
_COLOURS = {
    "decode": SERIES[0],
    "verify": SERIES[1],
    "draft": SERIES[2],
    "prefill": SERIES[3],
    "specpv": SERIES[5],
}


def plot_sweep(report: SweepReport, file: Path) -> None:
    """Write an SVG; the same report gives the same bytes. Both axes are logarithmic."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.5, 4.8), layout="constrained")
    axes = figure.subplots()
    axes.set_xscale("log")
    axes.set_yscale("log")
    phases = [phase for phase in report.phases if phase.operations_per_s]
    for sweep in dict.fromkeys(phase.sweep for phase in phases):
        rows = [phase for phase in phases if phase.sweep == sweep]
        axes.scatter(
            [row.operations / row.bytes_total for row in rows],
            [(row.operations_per_s or 0.0) / 1e12 for row in rows],
            label=sweep, color=_COLOURS[sweep], s=22,
        )  # fmt: skip
    if report.ceiling_bytes_per_s is not None and phases:
        intensities = [row.operations / row.bytes_total for row in phases]
        ends = [min(intensities) / 2, max(intensities) * 2]
        roof = [report.ceiling_bytes_per_s * end / 1e12 for end in ends]
        rate = report.ceiling_bytes_per_s / 1e12
        axes.plot(ends, roof, color=GREY, label=f"streaming read, {rate:.2f} TB/s")
    axes.set_xlabel("operations a byte read")
    axes.set_ylabel("TFLOP/s")
    axes.set_title(f"{report.engine} on {report.gpu}")
    axes.grid(visible=True, which="both", alpha=0.2)
    if phases:
        axes.legend()
    save_svg(figure, file)
