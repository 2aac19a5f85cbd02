"""Let SmolLM2 answer chat prompts: training text for its draft, one conversation a line.

    python examples/smollm2/write_conversations.py ENGINE --output DIR --count 8192

writes DIR/train.jsonl and DIR/held_out.jsonl (lines {"ids": […], "loss_from": N} for
`specbuild train draft`) and DIR/prompts.jsonl (held-out prompts for `specbuild bench pairs`). A
third of the answers is greedy, a third drawn at temperature 0.7, a third at 1. Half of the
conversations go on with a second question.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from pathlib import Path

from chat_prompts import chat_prompts, follow_ups

from specbuild import Engine, GenerateParams, Prompt
from specbuild.runtime.records import RunRecord
from specbuild.runtime.request import FinishEvent

TEMPERATURES = (0.0, 0.7, 1.0)
HELD_OUT = 128
Messages = list[dict[str, str]]


def answered(
    engine: Engine, chats: Sequence[Messages], new_tokens: int, seed: int
) -> Iterator[tuple[int, RunRecord]]:
    """Yield the chats' numbers and RunRecords, in the order in which their answers end."""
    prompts = [Prompt(id=str(i), messages=tuple(chat)) for i, chat in enumerate(chats)]
    params = [
        GenerateParams(
            max_new_tokens=new_tokens,
            temperature=TEMPERATURES[i % len(TEMPERATURES)],
            seed=seed + i,
        )
        for i in range(len(chats))
    ]
    for event in engine.generate(prompts, params, drafter="none"):
        if isinstance(event, FinishEvent):
            yield int(event.record.id), event.record


def write(engine: Engine, prompts: Sequence[str], new_tokens: int, file: Path) -> None:
    """Write the conversations that begin with ``prompts``."""
    chats: list[Messages] = [[{"role": "user", "content": prompt}] for prompt in prompts]
    tokens = done = 0
    with file.open("w") as output:
        for turn in range(2):
            for i, record in answered(engine, chats, new_tokens, seed=turn * len(prompts)):
                ids = [*record.prompt_ids, *record.output_ids]
                line = {"ids": ids, "loss_from": len(record.prompt_ids)}
                output.write(json.dumps(line) + "\n")
                tokens, done = tokens + len(record.output_ids), done + 1
                chats[i].append({"role": "assistant", "content": record.text or ""})
                if done % 64 == 0:
                    print(f"{file.name}: {done} answers, {tokens} tokens", flush=True)
            chats = chats[: len(prompts) // 2]
            for chat, question in zip(chats, follow_ups(len(chats)), strict=True):
                chat.append({"role": "user", "content": question})


def main() -> None:
    """Write the three files."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("engine", type=Path)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--count", type=int, default=8192)
    parser.add_argument("--new-tokens", type=int, default=256)
    args = parser.parse_args()
    args.output.mkdir(parents=True, exist_ok=True)
    held_out = chat_prompts(HELD_OUT, held_out=True)
    with (args.output / "prompts.jsonl").open("w") as output:
        for i, prompt in enumerate(held_out):
            line = {"id": f"held-out-{i}", "messages": [{"role": "user", "content": prompt}]}
            output.write(json.dumps(line) + "\n")
    with Engine.load(args.engine) as engine:
        write(engine, held_out, args.new_tokens, args.output / "held_out.jsonl")
        train = chat_prompts(args.count, held_out=False)
        write(engine, train, args.new_tokens, args.output / "train.jsonl")


if __name__ == "__main__":
    main()
