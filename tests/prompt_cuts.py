"""Split prompts at random: launches of prompt rows that end anywhere."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from random import Random
from typing import Any

import pytest

from specbuild.runtime.decode.scheduler import Batch, Scheduler


@contextmanager
def cut_at_random(seed: int, most: int) -> Iterator[list[int]]:
    """Give each launch of prompts 1 to ``most`` rows, and yield the list of launch sizes.

    Half of the sizes are below the square root of ``most``. A launch contains the rest of one
    prompt and the beginning of the next.
    """
    random, launched = Random(seed), list[int]()
    schedule = Scheduler.schedule

    def cut(self: Scheduler, *asked: Any) -> Batch:
        rows = round(most ** random.random())
        self._max_rows = rows
        batch = schedule(self, *asked)
        launched.extend([sum(chunk.count for chunk in batch.chunks)] if batch.chunks else [])
        return batch

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Scheduler, "schedule", cut)
        yield launched
