"""Law 6: every tensor that the model needs is present, and no others."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from specbuild.builder.checkpoint.source import SourceTensor
from specbuild.runtime.errors import SpecbuildError

NUMBER = re.compile(r"(?<=\.)\d{1,6}(?=\.)")
LINES_SHOWN = 24


@dataclass(frozen=True)
class ExpectedTensor:
    """The requirements of the model for one tensor."""

    shape: tuple[int, ...]
    dtypes: tuple[str, ...]


def audit(
    where: str,
    expected: Mapping[str, ExpectedTensor],
    found: Mapping[str, SourceTensor],
    hints: Iterable[str] = (),
) -> None:
    """Raise one SpecbuildError that lists all missing, unused, misshapen or mistyped tensors."""
    findings: dict[tuple[str, str], list[str]] = {}
    for name, wanted in expected.items():
        tensor = found.get(name)
        if tensor is None:
            findings.setdefault(("missing", f", shape {_axes(wanted.shape)}"), []).append(name)
            continue
        if tensor.shape != wanted.shape:
            detail = f": got {_axes(tensor.shape)}, expected {_axes(wanted.shape)}"
            findings.setdefault(("wrong shape", detail), []).append(_named(tensor))
        if tensor.dtype not in wanted.dtypes:
            detail = f": got {tensor.dtype}, expected {' or '.join(wanted.dtypes)}"
            findings.setdefault(("wrong dtype", detail), []).append(_named(tensor))
    for name, tensor in found.items():
        if name not in expected:
            detail = f", shape {_axes(tensor.shape)} {tensor.dtype}"
            findings.setdefault(("left over", detail), []).append(_named(tensor))
    if not findings:
        return
    lines = [
        f"  {kind}: {group}{detail}"
        for (kind, detail), names in findings.items()
        for group in group_names(names)
    ]
    if len(lines) > LINES_SHOWN:
        lines[LINES_SHOWN:] = [f"  … and {len(lines) - LINES_SHOWN} more lines like these"]
    count = sum(len(names) for names in findings.values())
    tensors = "1 tensor does" if count == 1 else f"{count} tensors do"
    advice = [f"  hint: {hint}" for hint in hints]
    raise SpecbuildError("\n".join([f"{where}: {tensors} not fit the model:", *lines, *advice]))


def group_names(names: Iterable[str]) -> list[str]:
    """Combine names that differ in one number: ``layers.{0-3,5}.mlp`` stands for five."""
    groups: dict[str, list[int]] = {}
    for name in names:
        number = NUMBER.search(name)
        pattern = NUMBER.sub("{}", name, count=1) if number else name
        groups.setdefault(pattern, []).extend([int(number.group())] if number else [])
    return [
        pattern.replace("{}", _ranges(sorted(numbers)), 1) if numbers else pattern
        for pattern, numbers in groups.items()
    ]


def _ranges(numbers: list[int]) -> str:
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    text = ",".join(str(low) if low == high else f"{low}-{high}" for low, high in runs)
    return text if len(numbers) == 1 else f"{{{text}}}"


def _named(tensor: SourceTensor) -> str:
    """Return the name on disk, which the user can search for."""
    return " + ".join(tensor.sources)


def _axes(shape: tuple[int, ...]) -> str:
    return f"[{', '.join(map(str, shape))}]"
