"""Whether two tactics computed the same, bit for bit."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np


def differing_values(
    wanted: Mapping[str, np.ndarray], found: Mapping[str, np.ndarray], nbytes: Mapping[str, int]
) -> int | None:
    """How many values differ in a bit, of outputs by name; None where ``found`` lacks outputs.

    A value of an output has ``nbytes``. A NaN equals itself, and no zero another of other sign.
    """
    if found.keys() != wanted.keys():
        return None
    return sum(_differing(wanted[name], found[name], nbytes[name]) for name in wanted)


def _differing(wanted: np.ndarray, found: np.ndarray, nbytes: int) -> int:
    one, other = (np.frombuffer(a.tobytes(), np.uint8).reshape(-1, nbytes) for a in (wanted, found))
    return int((one != other).any(axis=1).sum())
