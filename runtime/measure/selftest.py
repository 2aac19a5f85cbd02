"""Checks of a loaded engine against itself, without a checkpoint or a reference implementation.

Different kernels can compute the same tokens: prompt kernels and decoding steps, steps of one
sequence and of many, steps with and without a draft. On a sound machine they agree; if rows are
batch-invariant, they agree bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from statistics import median
from time import perf_counter

import numpy as np

from specbuild.runtime.decode.decoder import DraftSetting
from specbuild.runtime.decode.device.program_table import ProgramTable
from specbuild.runtime.decode.scoring import token_scores
from specbuild.runtime.draft.shared_noise import gumbel_noise
from specbuild.runtime.engine import Engine
from specbuild.runtime.errors import RequestError
from specbuild.runtime.executors.executor import DeviceExecutor
from specbuild.runtime.measure.losslessness import (
    NEAR_TIE,
    Ids,
    compare_runs,
    draft_settings,
    exact_params,
    first_difference,
)
from specbuild.runtime.records import RunRecord
from specbuild.runtime.request import FinishEvent, GenerateParams, Prompt
from specbuild.runtime.sampling import SamplingParams

GREEDY = SamplingParams()
SAMPLED = SamplingParams(temperature=1.0, seed=11)
PROMPT_LENGTHS = (5, 17, 33, 65)
MAX_TOKENS, MIN_TOKENS = 24, 4
BUDGET_S = 10.0
# Prompt kernels sum in another order than steps. A log-probability of a bf16 model differs by less
# than 0.02 in the median (tests/gpu); wrong kernels differ by more than 1.
MAX_MEDIAN_DIFFERENCE = 0.05
_PLAIN = DraftSetting(None)

Progress = Callable[[str], None]


@dataclass(frozen=True)
class SelfCheck:
    """A check: the comparison and its result. ``passed`` is None if it cannot run."""

    name: str
    detail: str
    passed: bool | None


def run_checks(
    engine: Engine, progress: Progress = lambda _: None, *, budget_s: float = BUDGET_S
) -> Iterator[SelfCheck]:
    """Yield the result of each check; together they take about ``budget_s`` seconds."""
    test = _SelfTest(engine, progress, budget_s)
    yield test.repeats()
    yield from test.batches()
    yield test.prompt_kernels()
    yield from test.drafts()


def tokens_per_s(engine: Engine) -> float:
    """Return the speed of one sequence without a draft, from its second token on."""
    params = exact_params(engine, GREEDY, MAX_TOKENS)
    (record,) = _decoded(engine, _prompts(engine)[:1], params, _PLAIN)
    tpot_s = record.stats.tpot_s
    return 1 / tpot_s if tpot_s else record.stats.output_tokens_per_s


class _SelfTest:
    """The runs that checks share, and the number of tokens that the budget allows."""

    def __init__(self, engine: Engine, progress: Progress, budget_s: float) -> None:
        self._engine = engine
        self._progress = progress
        self._exact = engine.executor.capabilities.batch_invariant
        self._prompts = _prompts(engine)
        self._settings = draft_settings(engine)
        self._tokens = MIN_TOKENS
        self._tokens = self._affordable_tokens(budget_s)
        progress(f"decoding {len(self._prompts)} prompts, {self._tokens} tokens each")
        self._plain = self._run(GREEDY, _PLAIN)

    def repeats(self) -> SelfCheck:
        """Run the same requests a second time."""
        again = self._run(GREEDY, _PLAIN)
        return self._compared("the same prompts again", self._plain, again, GREEDY)

    def batches(self) -> Iterator[SelfCheck]:
        """Run each prompt alone, and batches of each size with its own step programs."""
        engine, prompts = self._engine, self._prompts
        self._progress("decoding each prompt alone")
        alone = [self._run(GREEDY, _PLAIN, [prompt])[0] for prompt in prompts]
        name = f"{len(prompts)} prompts together, each as alone"
        yield self._compared(name, alone, self._plain, GREEDY)
        if not isinstance(engine.executor, DeviceExecutor):
            return
        max_batch = engine.manifest.limits.max_batch_size
        sizes = sorted(
            {min(b, max_batch) for b in ProgramTable(engine.executor.plan).step_batches()}
        )
        for size in [size for size in sizes if size > len(prompts)]:
            self._progress(f"decoding a batch of {size}")
            repeated = [prompts[i % len(prompts)] for i in range(size)]
            expected = [alone[i % len(prompts)] for i in range(size)]
            actual = self._run(GREEDY, _PLAIN, repeated)
            yield self._compared(f"batch of {size}, each as alone", expected, actual, GREEDY)

    def prompt_kernels(self) -> SelfCheck:
        """Compare log-probabilities of decoded tokens with those of the sequence as a prompt."""
        name = "prompt kernels against decoding steps"
        self._progress("reading the sequences as prompts")
        decoded = self._plain
        if any(None in (record.logprobs or (None,)) for record in decoded):
            decoded = self._run(GREEDY, _PLAIN, logprobs=True)
        differences: list[float] = []
        for prompt, record in zip(self._prompts, decoded, strict=True):
            ids = (*prompt, *record.output_ids)
            try:
                rows = list(self._engine.decoder.score(ids))
            except RequestError as error:
                return SelfCheck(name, str(error), None)
            scores = list(chain.from_iterable(token_scores(part, ids, 0) for part in rows))
            assert record.logprobs is not None
            for score, logprob in zip(scores[len(prompt) - 1 :], record.logprobs, strict=True):
                assert logprob is not None
                differences.append(abs(score.logprob - logprob))
        middle, largest = median(differences), max(differences)
        detail = (
            f"{len(differences)} log-probabilities differ by {middle:.1e} in the median, "
            f"{largest:.1e} at most"
        )
        return SelfCheck(name, detail, bool(middle <= MAX_MEDIAN_DIFFERENCE))

    def drafts(self) -> Iterator[SelfCheck]:
        """Compare every draft, greedy and sampled, with decoding without a draft."""
        if not self._settings:
            yield SelfCheck("drafts against no draft", "the engine has no draft", None)
            return
        for choice, sampling in (("greedy", GREEDY), ("sampled", SAMPLED)):
            plain = self._plain if sampling is GREEDY else self._run(sampling, _PLAIN)
            for name, setting in self._settings.items():
                self._progress(f"{choice}: {name}")
                drafted = self._run(sampling, setting)
                yield self._compared(f"{choice}: {name} against no draft", plain, drafted, sampling)

    def _run(
        self,
        sampling: SamplingParams,
        setting: DraftSetting,
        prompts: Sequence[Ids] | None = None,
        *,
        logprobs: bool = False,
    ) -> list[RunRecord]:
        prompts = self._prompts if prompts is None else prompts
        params = replace(exact_params(self._engine, sampling, self._tokens), logprobs=logprobs)
        return _decoded(self._engine, prompts, params, setting)

    def _affordable_tokens(self, budget_s: float) -> int:
        """Return the number of tokens per run within the budget; the first run warms up."""
        self._run(GREEDY, _PLAIN)
        started_s = perf_counter()
        self._run(GREEDY, _PLAIN)
        per_token_s = (perf_counter() - started_s) / self._tokens
        runs = 3 + len(self._prompts) + 2 * len(self._settings)
        affordable = int(budget_s / (runs * per_token_s))
        limit = self._engine.manifest.limits.max_seq_len - max(map(len, self._prompts))
        return max(1, min(max(affordable, MIN_TOKENS), MAX_TOKENS, limit))

    def _compared(
        self,
        name: str,
        expected: Sequence[RunRecord],
        actual: Sequence[RunRecord],
        sampling: SamplingParams,
    ) -> SelfCheck:
        if self._exact:
            return _same_bits(name, expected, actual)
        prompts = [record.prompt_ids for record in expected]
        runs = ([r.output_ids for r in expected], [r.output_ids for r in actual])
        tokens, differences, ties = compare_runs(
            prompts, runs, lambda prefix: self._gap(prefix, sampling)
        )
        detail = f"{tokens} tokens, {differences} sequences differ"
        if ties:
            detail += f", {ties} at a tie of scores within {NEAR_TIE:g}"
        return SelfCheck(name, detail, differences == 0)

    def _gap(self, prefix: Ids, sampling: SamplingParams) -> float:
        """Return the distance of the two best scores of the token after a prefix."""
        *_, last = self._engine.decoder.score(prefix)
        scores = last.logits[-1].astype(np.float64)
        if sampling.temperature > 0:
            seed, position = np.array([sampling.noise_seed]), np.array([len(prefix) - 1])
            noise = gumbel_noise(seed, position, np.arange(len(scores))[None])[0]
            scores = scores / sampling.temperature + noise
        below, best = np.partition(scores, -2)[-2:]
        return float(best - below)


def _same_bits(name: str, expected: Sequence[RunRecord], actual: Sequence[RunRecord]) -> SelfCheck:
    tokens = sum(len(record.output_ids) for record in expected)
    for place, (one, other) in enumerate(zip(expected, actual, strict=True)):
        at = first_difference(one.output_ids, other.output_ids)
        if at is not None or len(one.output_ids) != len(other.output_ids):
            where = f"token {at} of sequence {place}" if at is not None else f"sequence {place}"
            return SelfCheck(name, f"{where} differs", False)
        if one.logprobs != other.logprobs:
            return SelfCheck(name, f"log-probabilities of sequence {place} differ", False)
    return SelfCheck(name, f"{tokens} tokens, bit for bit", True)


def _prompts(engine: Engine) -> list[Ids]:
    """Return random prompts of several lengths, equal in every run."""
    limits, vocab = engine.manifest.limits, engine.manifest.target.vocab
    longest = max(1, limits.max_seq_len - MAX_TOKENS - 1)
    random = np.random.default_rng(5)
    lengths = [min(length, longest) for length in PROMPT_LENGTHS[: limits.max_batch_size]]
    return [tuple(map(int, random.integers(0, vocab, length))) for length in lengths]


def _decoded(
    engine: Engine,
    prompts: Sequence[Ids],
    params: GenerateParams,
    setting: DraftSetting,
) -> list[RunRecord]:
    """Return the records of all prompts, in order."""
    requests = [Prompt(str(i), prompt_ids=ids) for i, ids in enumerate(prompts)]
    events = engine.generate(
        requests, params, speculation=setting.speculation, drafter=setting.drafter
    )
    actual = {e.request: e.record for e in events if isinstance(e, FinishEvent)}
    return [actual[i] for i in range(len(prompts))]
