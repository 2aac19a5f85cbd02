"""The simulated server, compared with queueing theory and with the loop, turn by turn."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from statistics import mean

import pytest
from toy_engine import prompt, toy_engine
from toy_model import toy_manifest

from specbuild.runtime.decode.decoder import DraftSetting
from specbuild.runtime.draft.device_costs import ShapeCosts
from specbuild.runtime.engine_dir.manifest import DraftShape
from specbuild.runtime.errors import SpecbuildError
from specbuild.runtime.measure.serving.costs import ServingCosts
from specbuild.runtime.measure.serving.host_measurement import measure_host_costs, measurements
from specbuild.runtime.measure.serving.simulation import Traffic, simulate
from specbuild.runtime.request import GenerateParams, TokenEvent


def steps(depth: int, *times: float, batches: Sequence[int] = (1,)) -> tuple[ShapeCosts, ...]:
    """Return steps whose time does not depend on the context."""
    return tuple(
        ShapeCosts(batch, min(depth, 1), depth, depth, (0,), (time_s,), (0.0,))
        for batch, time_s in zip(batches, times, strict=True)
    )


def costs(*entries: ShapeCosts, prompt_s: float = 1.0, rows: int = 8) -> ServingCosts:
    """Return costs with one time for every launch of prompts."""
    return ServingCosts("toy", rows, (rows,), (prompt_s,), entries)


def traffic(**given: float) -> Traffic:
    """Return one request of one client, with these changes."""
    usual = {"requests": 1, "prompt_tokens": 5, "output_tokens": 4}
    return Traffic(**(usual | given))  # type: ignore[arg-type]


def test_a_single_request_takes_the_time_of_its_launches() -> None:
    found = simulate(
        toy_manifest(), costs(*steps(0, 0.5), prompt_s=2.0), traffic(prompt_tokens=20, request_s=3)
    )
    (served,) = found.served
    # Chunks of 8, 8 and 4 rows; then three steps.
    assert (served.ttft_s, served.tpot_s, served.tokens) == (3 + 3 * 2.0, 0.5, 4)
    assert (found.duration_s, found.busy_share) == (10.5, 7.5 / 10.5)


def test_the_cost_of_context_follows_from_long_prompts() -> None:
    table = ServingCosts("toy", 8, (4, 8, 24), (1.0, 2.0, 7.5), steps(0, 1.0))
    assert [table.prompts_s([(0, n)]) for n in (2, 4, 6, 8)] == [1.0, 1.0, 1.5, 2.0]
    # Three launches of 8 rows take 6; the rest is for 8 · 8 + 8 · 16 tokens that rows saw.
    assert table.prompts_s([(16, 8)]) == pytest.approx(2.0 + 1.5 * (8 * 16) / 192)
    assert sum(table.prompts_s([(at, 8)]) for at in (0, 8, 16)) == pytest.approx(7.5)
    assert table.prompts_s([(8, 4), (0, 4)]) == pytest.approx(2.0 + 1.5 * (8 * 4) / 192)


@pytest.mark.parametrize("load", [0.3, 0.7])
def test_waiting_time_equals_the_pollaczek_khinchine_formula(load: float) -> None:
    """One sequence at a time, all served in the same time: W = ρ · s / (2 · (1 − ρ))."""
    manifest = toy_manifest(max_batch_size=1)
    asked = traffic(requests=8000, output_tokens=1, rate=load / 2.0)
    found = simulate(manifest, costs(*steps(0, 1.0), prompt_s=2.0), asked)
    waited = mean(served.ttft_s - 2.0 for served in found.served)
    assert waited == pytest.approx(load * 2.0 / (2 * (1 - load)), rel=0.12)
    assert found.busy_share == pytest.approx(load, rel=0.05)


@pytest.mark.parametrize("kv_pages", [None, 14])
@pytest.mark.parametrize(("count", "tokens", "length"), [(2, 6, 3), (5, 4, 19), (7, 9, 8)])
def test_simulated_steps_equal_those_of_the_serving_loop(
    count: int, tokens: int, length: int, kv_pages: int | None
) -> None:
    engine = toy_engine(drafted=False, kv_pages=kv_pages)
    prompts = [prompt(range(1, length + 1), str(i)) for i in range(count)]
    requests = engine.check_prompts(prompts, GenerateParams(tokens, ignore_eos=True))
    loop = engine.decoder.loop(DraftSetting(None), text_stream=lambda _: None)
    for request in requests:
        loop.add(request)
    loop.open()
    ended: dict[int, list[int]] = {i: [] for i in range(count)}
    turn = 0
    while not loop.idle:
        turn += 1
        for event in loop.turn():
            if isinstance(event, TokenEvent):
                ended[event.request].append(turn)
    loop.close()
    asked = traffic(requests=count, clients=count, prompt_tokens=length, output_tokens=tokens)
    found = simulate(engine.manifest, costs(*steps(0, 1.0)), asked)
    assert [(s.first_s, s.last_s) for s in found.served] == [
        (times[0], times[-1]) for times in ended.values()
    ]


def test_drafts_that_are_always_right_save_steps() -> None:
    chain = (*steps(0, 1.0, 1.5, batches=(1, 4)), *steps(3, 1.0, 1.5, batches=(1, 4)))
    asked = traffic(requests=40, output_tokens=41)
    plain = simulate(toy_manifest(), costs(*chain), asked)
    drafted = simulate(toy_manifest(), costs(*chain), asked, acceptance=(1.0,))
    assert mean(s.tpot_s or 0 for s in plain.served) == 1.0
    # Four tokens a step, but for the steps that explore.
    assert mean(s.tpot_s or 0 for s in drafted.served) == pytest.approx(0.25, rel=0.1)
    never = simulate(toy_manifest(), costs(*chain), asked, acceptance=(1e-9,))
    assert mean(s.tpot_s or 0 for s in never.served) == pytest.approx(1.0, rel=0.02)


def test_closed_loop_clients_send_the_next_request_after_an_answer() -> None:
    asked = traffic(requests=9, clients=3, output_tokens=2)
    found = simulate(toy_manifest(max_batch_size=3), costs(*steps(0, 1.0), rows=64), asked)
    came = sorted(served.arrival_s for served in found.served)
    assert came[:3] == [0, 0, 0] and came[3] > 0
    ends = sorted(served.last_s for served in found.served)
    assert came[3:] == ends[:6]


def test_rejects_requests_that_do_not_fit() -> None:
    with pytest.raises(SpecbuildError, match="the engine takes 64"):
        simulate(toy_manifest(), costs(*steps(0, 1.0)), traffic(prompt_tokens=61))
    good = costs(*steps(0, 1.0))
    for wrong in (
        {"prompt_tokens": ()},
        {"prompt_s": (-1.0,)},
        {"steps": ()},
        {"chunk_rows": 0},
        {"steps": steps(2, 1.0)},
        {"prompt_tokens": (8, 8), "prompt_s": (1.0, 1.0)},
    ):
        with pytest.raises(SpecbuildError, match="malformed"):
            replace(good, **wrong)


@pytest.mark.parametrize("drafted", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_host_is_measured_for_every_batch_and_chain(drafted: bool) -> None:
    engine = toy_engine(max_seq_len=128, max_rows=24)
    told: list[None] = []
    found = measure_host_costs(
        engine, "here", (5, 9), drafted=drafted, done=lambda: told.append(None)
    )
    assert len(told) == measurements(engine, (5, 9), drafted=drafted)
    assert (found.machine, found.chunk_rows, found.prompt_tokens) == ("here", 24, (5, 16, 64))
    depths = [0, 1, 2, 3, 4] if drafted else [0]
    assert [(e.draft_depth, e.batch) for e in found.steps] == [
        (depth, batch) for depth in depths for batch in (1, 2, 3)
    ]
    chains = tuple(DraftShape(1, d, d) for d in depths[1:])
    assert found.shapes == chains
    free = {name: pool.free_pages for name, pool in engine._kv.pools.items()}
    assert free == {name: group.pages - 1 for name, group in
                    ((g.name, g) for g in engine.manifest.cache_groups)}  # fmt: skip
