"""Measures the costs of launches for an engine on the host, with the loop of the server."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import median
from time import perf_counter

import numpy as np

from specbuild.runtime.decode.decoder import DraftSetting, Speculation
from specbuild.runtime.draft.device_costs import ShapeCosts
from specbuild.runtime.engine import Engine
from specbuild.runtime.engine_dir.manifest import DraftShape
from specbuild.runtime.measure.serving.costs import ServingCosts
from specbuild.runtime.request import GenerateParams, Prompt, TokenEvent
from specbuild.runtime.settings import PrefillSchedule

_PROMPTS = (16, 64, 256, 1024, 4096)
_ROUNDS = 3
# The number of steps of each kind that a round times, and of steps before them.
_STEPS, _STEPS_BEFORE_TIMING = 6, 2
# The longest measured chain; a longer one rarely pays on a host.
_DEEPEST = 4


def measure_host_costs(
    engine: Engine,
    machine: str,
    contexts: Sequence[int],
    *,
    drafted: bool,
    done: Callable[[], None],
) -> ServingCosts:
    """Time prompts, and steps of every batch after each of ``contexts`` (ascending).

    With ``drafted``, steps with drafts are timed too. The first context is one of the prompts'
    lengths.

    ``done`` is called :func:`measurements` times. Prompts and tokens are random, since times do not
    depend on them. Each round measures all kinds, and medians are over all rounds: a disturbance of
    the machine affects every kind.
    """
    limits, lengths = engine.manifest.limits, _lengths(engine, contexts)
    kinds = [(shape, batch) for shape in _shapes(engine, drafted) for batch in _batches(engine)]
    prompt_s: list[list[float]] = [[] for _ in lengths]
    step_s: list[list[list[float]]] = [[[] for _ in contexts] for _ in kinds]
    _turns(engine, [max(lengths)], _STEPS, None)
    for _ in range(_ROUNDS):
        for times_s, tokens in zip(prompt_s, lengths, strict=True):
            times_s.append(sum(_turns(engine, [tokens], 1, None)))
            done()
        for (shape, batch), places in zip(kinds, step_s, strict=True):
            for times, context in zip(places, contexts, strict=True):
                depth = 0 if shape is None else shape.draft_depth
                tokens = (_STEPS + _STEPS_BEFORE_TIMING) * (depth + 1)
                # Turns with prefill come first, and a sequence may end early.
                times.extend(_turns(engine, [context] * batch, tokens, shape)[-_STEPS:])
            done()
    return ServingCosts(
        machine=machine,
        chunk_rows=limits.max_rows,
        prompt_tokens=tuple(lengths),
        prompt_s=tuple(map(median, prompt_s)),
        steps=tuple(
            _costs(shape, batch, contexts, places)
            for (shape, batch), places in zip(kinds, step_s, strict=True)
        ),
    )


def measurements(engine: Engine, contexts: Sequence[int], *, drafted: bool) -> int:
    """Return the number of times that ``done`` is called."""
    prompts = len(_lengths(engine, contexts))
    return _ROUNDS * (prompts + len(_shapes(engine, drafted)) * len(_batches(engine)))


def _lengths(engine: Engine, contexts: Sequence[int]) -> list[int]:
    limit = engine.manifest.limits.max_seq_len
    return sorted({n for n in (*_PROMPTS, contexts[0]) if n < limit})


def _shapes(engine: Engine, drafted: bool) -> list[DraftShape | None]:
    limits, has_draft = engine.manifest.limits, drafted and engine.manifest.draft is not None
    deepest = limits.levels_of(engine.manifest.draft) if has_draft else 0
    return [None, *(DraftShape(1, d, d) for d in range(1, min(deepest, _DEEPEST) + 1))]


def _batches(engine: Engine) -> list[int]:
    limit = engine.manifest.limits.max_batch_size
    return sorted({min(2**i, limit) for i in range(limit.bit_length() + 1)})


def _costs(
    shape: DraftShape | None,
    batch: int,
    contexts: Sequence[int],
    times: Sequence[Sequence[float]],
) -> ShapeCosts:
    """Return the costs of complete steps of one draft and batch, including the host's work."""
    depth = 0 if shape is None else shape.draft_depth
    return ShapeCosts(
        batch=batch,
        draft_top_k=min(depth, 1),
        draft_depth=depth,
        draft_tokens=depth,
        contexts=tuple(contexts),
        step_s=tuple(map(median, times)),
        draft_s=(0.0,) * len(contexts),
    )


def _turns(
    engine: Engine, lengths: Sequence[int], tokens: int, speculation: Speculation
) -> list[float]:
    """Return the seconds of each turn of a loop that serves these prompts.

    It ends at the first turn that emits for fewer sequences than before, so all batches are full.
    """
    random = np.random.default_rng(sum(lengths))
    vocab = engine.manifest.target.vocab
    prompts = [
        Prompt(str(i), prompt_ids=tuple(map(int, random.integers(0, vocab, length))))
        for i, length in enumerate(lengths)
    ]
    params = GenerateParams(max_new_tokens=tokens, ignore_eos=True)
    requests = engine.check_prompts(prompts, params)
    decoder, times = engine.decoder, []
    with decoder.device_lock:
        # All prompts are prefilled before the first step.
        loop = decoder.loop(
            DraftSetting(speculation),
            text_stream=lambda _: None,
            prefill=PrefillSchedule(steps_between=0),
        )
        for request in requests:
            loop.add(request)
        loop.open()
        try:
            began: set[int] = set()
            while not loop.idle:
                started_s = perf_counter()
                events = loop.turn()
                emitted = {event.request for event in events if isinstance(event, TokenEvent)}
                if len(began) == len(requests) and len(emitted) < len(requests):
                    break
                times.append(perf_counter() - started_s)
                began |= emitted
        finally:
            loop.close()
    return times
