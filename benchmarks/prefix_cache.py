"""Measures the gain of cached prefixes: one JSON line.

Pairs of the same prompt, cold and with a cached prefix: TTFT, and whether the tokens and the
accepted draft tokens are equal. Then chats of several turns, with and without the cache,
alternating; and the number of prefixes that remain when each of many is requested again.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from pathlib import Path
from random import Random
from statistics import median

from specbuild.runtime.decode.decoder import DraftSetting
from specbuild.runtime.engine import Engine
from specbuild.runtime.engine_dir.backends import facts_of
from specbuild.runtime.engine_dir.manifest import DraftShape
from specbuild.runtime.records import RunRecord
from specbuild.runtime.request import FinishEvent, GenerateParams, Prompt
from specbuild.runtime.settings import RuntimeSettings

_EXAMPLES = """examples:
  python benchmarks/prefix_cache.py engine --tokens 1500
  python benchmarks/prefix_cache.py engine --tokens 1500 --turns 20 --added 300 --together 8
  python benchmarks/prefix_cache.py 20b --tokens 8192 --turns 20 --added 300 --together 8
  python benchmarks/prefix_cache.py engine --rounds 0 --tokens 600 --beginnings 8 16 32
"""


def main() -> None:
    """Measure both, and print the results."""
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=_EXAMPLES, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("engine", type=Path)
    parser.add_argument("--tokens", type=int, default=1500, help="of a prompt (1500)")
    parser.add_argument("--rounds", type=int, default=5, help="pairs of prompts (5)")
    parser.add_argument("--turns", type=int, default=0, help="of a chat; 0 leaves chats out (0)")
    parser.add_argument("--added", type=int, default=60, help="tokens that a turn adds (60)")
    parser.add_argument("--chat-rounds", type=int, default=1, help="pairs of all chats (1)")
    parser.add_argument("--answer", type=int, default=16, help="tokens of an answer (16)")
    parser.add_argument("--together", type=int, default=8, help="chats at once (8)")
    parser.add_argument("--beginnings", type=int, nargs="*", default=[], help="that differ")
    args = parser.parse_args()
    result: dict[str, object] = {"engine": args.engine.name, "tokens": args.tokens}
    cached = RuntimeSettings(prefix_caching="on")
    engine = Engine.load(args.engine, cached)
    if args.rounds:
        result |= _pairs(engine, args)
    if args.turns:
        result |= _chats_with_and_without(engine, args)
    if args.beginnings:
        result["beginnings, found again"] = [
            (count, _found_again(Engine.load(args.engine, cached), args.tokens, count))
            for count in args.beginnings
        ]
    print(json.dumps(result))


def _pairs(engine: Engine, args: argparse.Namespace) -> dict[str, object]:
    random, vocab = Random(0), engine.manifest.target.vocab
    cold: list[RunRecord] = []
    warm: list[RunRecord] = []
    for number in range(args.rounds + 1):
        ids = random.choices(range(vocab), k=args.tokens)
        for records in (cold, warm):
            record = _finished(engine, [ids], new_tokens=32)[0]
            if number:  # The first pair records the graphs.
                records.append(record)
    alike = sum(a.output_ids == b.output_ids for a, b in zip(cold, warm, strict=True))
    return {
        "cold_ttft_s": median(r.stats.ttft_s for r in cold),
        "hit_ttft_s": median(r.stats.ttft_s for r in warm),
        "ratio": median(b.stats.ttft_s / a.stats.ttft_s for a, b in zip(cold, warm, strict=True)),
        "cached_tokens": warm[0].stats.cached_tokens,
        "same_tokens": f"{alike} of {args.rounds}",
        "acceptance_length": [
            sum(r.stats.mean_acceptance_length for r in records) / len(records)
            for records in (cold, warm)
        ],
    }


def _chats_with_and_without(engine: Engine, args: argparse.Namespace) -> dict[str, object]:
    """Run chats with and without the cache: seconds, and output tokens per second.

    On a CPU, seconds are CPU time of the process, so that other processes do not count.
    """
    on_gpu = facts_of(engine.manifest.backend).on_gpu
    clock, kind = (time.perf_counter, "s") if on_gpu else (time.process_time, "cpu_s")
    engines = {f"chats_{kind}": engine, f"chats_without_{kind}": Engine.load(args.engine)}
    result: dict[str, list[float]] = {name: [] for name in engines}
    cached: list[int] = []
    for round_ in range(args.chat_rounds + 1):
        for name, each in engines.items():
            turns = args.turns if round_ else min(args.turns, 3)
            started_s = clock()
            tokens = _chats(each, args, turns=turns, seed=round_)
            if round_:  # The first one records the graphs.
                result[name].append(clock() - started_s)
            if each is engine:
                cached.append(tokens)
    with_s, without_s = (median(seconds) for seconds in result.values())
    tokens = args.turns * args.together * args.answer
    return result | {
        f"tokens_per_{kind}": tokens / with_s,
        f"tokens_per_{kind}_without": tokens / without_s,
        "times": median(b / a for a, b in zip(*result.values(), strict=True)),
        "cached_share": cached[-1] / _prompt_tokens(args),
    }


def _chats(engine: Engine, args: argparse.Namespace, *, turns: int, seed: int) -> int:
    """Run chats concurrently, each answer in the next prompt; return the cached prompt tokens."""
    random, vocab = Random(seed), engine.manifest.target.vocab
    chats: list[list[int]] = [[] for _ in range(args.together)]
    cached = 0
    for _ in range(turns):
        for chat in chats:
            chat.extend(random.choices(range(vocab), k=args.added))
        records = _finished(engine, chats, new_tokens=args.answer)
        for chat, record in zip(chats, records, strict=True):
            chat.extend(record.output_ids)
        cached += sum(record.stats.cached_tokens for record in records)
    return cached


def _prompt_tokens(args: argparse.Namespace) -> int:
    """Return the values of all turns of all chats."""
    turn = args.added + args.answer
    return args.together * sum(n * turn + args.added for n in range(args.turns))


def _found_again(engine: Engine, tokens: int, count: int) -> int:
    """Return how many of several consecutive prompts have cached prefixes at their next turn."""
    random, vocab = Random(2), engine.manifest.target.vocab
    prompts = [random.choices(range(vocab), k=tokens) for _ in range(count)]
    for ids in prompts:
        ids.extend(_finished(engine, [ids], new_tokens=16)[0].output_ids)
        ids.extend(random.choices(range(vocab), k=60))
    records = [_finished(engine, [ids], new_tokens=16)[0] for ids in prompts]
    return sum(r.stats.cached_tokens > tokens - 32 for r in records)


def _finished(engine: Engine, prompts: Sequence[list[int]], *, new_tokens: int) -> list[RunRecord]:
    params = GenerateParams(max_new_tokens=new_tokens, ignore_eos=True)
    listed = [Prompt(str(i), prompt_ids=tuple(ids)) for i, ids in enumerate(prompts)]
    shape = None if engine.manifest.draft is None else DraftShape(1, 3, 3)
    stream = engine.session.add(engine.check_prompts(listed, params), DraftSetting(shape))
    ended = {e.request: e.record for e in stream if isinstance(e, FinishEvent)}
    return [ended[i] for i in range(len(prompts))]


if __name__ == "__main__":
    main()
