"""What a prompt that begins as another did saves: one JSON line.

Pairs of the same prompt, cold and behind a cached beginning: times to the first token, whether the
tokens and the accepted drafts are equal. Then chats of several turns, with the cache and without.
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
from specbuild.runtime.engine_dir.manifest import DraftShape
from specbuild.runtime.records import RunRecord
from specbuild.runtime.request import FinishEvent, GenerateParams, Prompt

_EXAMPLES = """examples:
  python benchmarks/prefix_cache.py engine --tokens 1500
  python benchmarks/prefix_cache.py engine --tokens 1500 --turns 20 --added 60 --together 8
"""


def main() -> None:
    """Measures both, and prints what was found."""
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=_EXAMPLES, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("engine", type=Path)
    parser.add_argument("--tokens", type=int, default=1500, help="of a prompt (1500)")
    parser.add_argument("--rounds", type=int, default=5, help="pairs of prompts (5)")
    parser.add_argument("--turns", type=int, default=0, help="of a chat; 0 leaves chats out (0)")
    parser.add_argument("--added", type=int, default=60, help="tokens that a turn adds (60)")
    parser.add_argument("--together", type=int, default=8, help="chats at once (8)")
    asked = parser.parse_args()
    engine = Engine.load(asked.engine)
    found = {"engine": asked.engine.name, "tokens": asked.tokens} | _pairs(engine, asked)
    if asked.turns:
        cold_s = _chats(Engine.load(asked.engine), asked)
        found |= {"chats_s": _chats(engine, asked), "chats_without_s": cold_s}
    print(json.dumps(found))


def _pairs(engine: Engine, asked: argparse.Namespace) -> dict[str, object]:
    engine.keep_prefixes()
    random, vocab = Random(0), engine.manifest.target.vocab
    cold: list[RunRecord] = []
    warm: list[RunRecord] = []
    for number in range(asked.rounds + 1):
        ids = random.choices(range(vocab), k=asked.tokens)
        for records in (cold, warm):
            record = _finished(engine, [ids], new_tokens=32)[0]
            if number:  # the first pair makes the graphs ready
                records.append(record)
    alike = sum(a.output_ids == b.output_ids for a, b in zip(cold, warm, strict=True))
    return {
        "cold_ttft_s": median(r.stats.ttft_s for r in cold),
        "hit_ttft_s": median(r.stats.ttft_s for r in warm),
        "ratio": median(b.stats.ttft_s / a.stats.ttft_s for a, b in zip(cold, warm, strict=True)),
        "cached_tokens": warm[0].stats.cached_tokens,
        "same_tokens": f"{alike} of {asked.rounds}",
        "acceptance_length": [
            sum(r.stats.mean_acceptance_length for r in records) / len(records)
            for records in (cold, warm)
        ],
    }


def _chats(engine: Engine, asked: argparse.Namespace) -> float:
    """Seconds for all turns of chats that run side by side, each of its answers a prompt's part."""
    random, vocab = Random(1), engine.manifest.target.vocab
    chats: list[list[int]] = [[] for _ in range(asked.together)]
    started_s = time.perf_counter()
    for _ in range(asked.turns):
        for chat in chats:
            chat.extend(random.choices(range(vocab), k=asked.added))
        for chat, record in zip(chats, _finished(engine, chats, new_tokens=16), strict=True):
            chat.extend(record.output_ids)
    return time.perf_counter() - started_s


def _finished(engine: Engine, prompts: Sequence[list[int]], *, new_tokens: int) -> list[RunRecord]:
    params = GenerateParams(max_new_tokens=new_tokens, ignore_eos=True)
    listed = [Prompt(str(i), prompt_ids=tuple(ids)) for i, ids in enumerate(prompts)]
    shape = None if engine.manifest.draft is None else DraftShape(1, 3, 3)
    stream = engine.session.add(engine.check_prompts(listed, params), DraftSetting(shape))
    ended = {e.request: e.record for e in stream if isinstance(e, FinishEvent)}
    return [ended[i] for i in range(len(prompts))]


if __name__ == "__main__":
    main()
