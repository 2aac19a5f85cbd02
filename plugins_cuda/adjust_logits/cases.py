"""Named cases of AdjustLogits."""

from __future__ import annotations

import numpy as np

from specbuild.plugins_cuda.cases import Arrays, Case
from specbuild.runtime.engine_dir.plan import ADJUSTS, ENDS_OUTPUT, IN_PROMPT, MASKED_ROW


def adjust(
    name: str, kinds: str, *, vocab: int = 70, counts: bool = True, penalised: bool = True
) -> Case:
    """A row for each of ``kinds``: ``-`` changes nothing, ``a`` adjusts, ``m`` is masked, ``b``
    both, ``d`` adjusts and is done. ``counts``: its own tokens are counted."""

    def make(rng: np.random.Generator) -> Arrays:
        rows = len(kinds)
        of_kind = {"-": 0, "a": ADJUSTS, "m": MASKED_ROW, "b": ADJUSTS | MASKED_ROW, "d": ADJUSTS}
        marks = rng.integers(-5, 4, (rows, vocab)).clip(0)
        marks += rng.integers(0, 2, marks.shape) * IN_PROMPT
        marks += (rng.integers(0, 9, marks.shape) == 0) * ENDS_OUTPUT
        bias = rng.uniform(-100, 100, marks.shape) * rng.integers(0, 2, marks.shape)
        usual = np.array([1.0, 0.0, 0.0])[:, None].repeat(rows, axis=1)
        drawn = np.stack([rng.uniform(0.3, 3, rows), *rng.uniform(-2, 2, (2, rows))])
        penalties = drawn if penalised else usual
        words = -(-vocab // 32)
        return (
            (rng.standard_normal((rows, vocab)) * 3).astype(np.float32),
            rng.integers(0, vocab, rows).astype(np.int32) if counts else None,
            rng.integers(0, 40, rows).astype(np.int32),
            np.array([kind == "d" for kind in kinds], np.int32) if counts else None,
            np.array([of_kind[kind] for kind in kinds], np.int32),
            rng.integers(0, 40, rows).astype(np.int32),
            *penalties.astype(np.float32),
            bias.astype(np.float32),
            rng.integers(-(2**31), 2**31, (rows, words)).astype(np.int32),
            marks.astype(np.int32),
        )

    return Case(name, make, atol=0, rtol=0, kernel_atol=0, kernel_rtol=0)


CASES: tuple[Case, ...] = (
    adjust("nothing is asked for", "--"),
    adjust("adjusted rows", "aaaaaa"),
    adjust("adjusted, nothing to count", "aaaa", counts=False),
    adjust("without penalties", "ab", penalised=False),
    adjust("masked rows", "mm-m"),
    adjust("every kind of row", "-ambd", vocab=37),
    adjust("done rows are not counted", "dadd"),
    adjust("a vocabulary of one", "ab", vocab=1),
)

KERNEL_CASES: tuple[Case, ...] = (
    adjust("more tokens than a block has", "-amb", vocab=4099),
    adjust("gpu: the vocabulary of GPT-OSS", "-ambd" * 3, vocab=201_088),
)
