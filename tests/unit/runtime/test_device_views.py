"""Which sequences are re-verified when a step has capacity for fewer buffers than sequences."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from toy_partial import TOY_SPECPV, partial_manifest

from specbuild.runtime.engine_dir.manifest import DraftShape
from specbuild.runtime.executors.executor import StepResult
from specbuild.runtime.lossy.mode import ModeRequest, StepAhead
from specbuild.runtime.lossy.specpv.ahead import DeviceViews


class Deaf:
    """An executor that ignores all writes."""

    def write(self, *_: object) -> None: ...
    def fill(self, *_: object, **__: object) -> None: ...


@pytest.mark.parametrize("lengths", [(30, 30, 30), (30, 31, 33)])
@pytest.mark.parametrize("emitted", [3, 2, 1])
def test_sequences_alternate_if_only_one_buffer_fits(
    lengths: tuple[int, ...], emitted: int
) -> None:
    """Sequences whose buffers would fill together alternate, some before they must."""
    shape, capacity = DraftShape(1, 2, 2), TOY_SPECPV.n_spec_tokens_buf
    programs = SimpleNamespace(refresh_capacity=lambda _shape, *, batch: capacity * (batch > 0))
    views = DeviceViews(Deaf(), partial_manifest(TOY_SPECPV), programs)  # type: ignore[arg-type]
    sequences: list[Any] = []
    for index, length in enumerate(lengths):
        params = SimpleNamespace(specpv_retrieval_blocks=None)
        request = SimpleNamespace(id="s", prompt_ids=(0,) * length, params=params, token_budget=999)
        sequences.append(SimpleNamespace(index=index, request=request, counters=SimpleNamespace()))
        views.begin(sequences[-1], index)
    count, none = [emitted] * len(lengths), [0] * len(lengths)
    result = StepResult(count, none, [], [], rechecked=none, agreed=none)
    mode_requests: list[ModeRequest] = []
    for step in range(80):
        mode_requests.append(
            views.request_step(StepAhead(dict(enumerate(sequences)), shape, most_emitted=0))
        )
        if step > 0:  # two in flight
            for row, sequence in enumerate(sequences):
                views.received(sequence, mode_requests[step - 1], result, row)
    fed = [mode_request.reverified or 0 for mode_request in mode_requests]
    assert max(fed) <= capacity
    assert sum(rows > 0 for rows in fed) > len(lengths)
    for sequence in sequences:
        stats = sequence.counters.specpv
        assert stats.partial_steps > stats.full_steps and stats.invariant_failures == 0
