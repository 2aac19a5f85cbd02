"""Let SmolLM2 answer chat prompts: training text for its draft, one conversation a line.

    python examples/smollm2/write_conversations.py MODEL.gguf --output DIR --device cuda

writes DIR/train.jsonl, DIR/held_out.jsonl (lines {"ids": […], "loss_from": N} for `specbuild train
draft`) and DIR/prompts.jsonl (held-out prompts for `specbuild bench`). A third of the answers is
greedy, a third drawn at temperature 0.7, a third at 1. Half of the conversations go on with a
second question.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from chat_prompts import chat_prompts, follow_ups

from specbuild.builder.checkpoint.opened import open_target
from specbuild.builder.families.registry import gguf_forms
from specbuild.builder.training.frozen_target import end_of_text_ids, load_target
from specbuild.runtime.text.chat_template import ChatTemplate
from specbuild.runtime.text.tokenizer import OpenedTokenizer

TEMPERATURES = (0.0, 0.7, 1.0)
HELD_OUT = 128


class Chat:
    """The model with its tokenizer and chat template."""

    def __init__(self, path: Path, device: str, dtype: str) -> None:
        files = {f.name: f.read_bytes() for f in open_target(path, gguf_forms()).text_files(())}
        self.tokenizer = OpenedTokenizer(files["tokenizer.json"])
        self.template = ChatTemplate(files["chat_template.jinja"].decode())
        self.model: Any = load_target(path, device=device, dtype=dtype, teacher=False)
        self.model.set_attn_implementation("sdpa")
        self.device = device
        self.stop = end_of_text_ids(self.model)

    def opened(self, messages: Sequence[dict[str, str]]) -> list[int]:
        """Token ids of a conversation with the assistant's turn opened."""
        return self.tokenizer.encode(self.template.render(messages, {}), special=False)

    @torch.no_grad()
    def answers(
        self, prompts: Sequence[list[int]], new_tokens: int, temperature: float, seed: int
    ) -> list[list[int]]:
        """One answer a prompt, its end included; all run as one batch, padded at the left."""
        longest = max(map(len, prompts))
        fill = self.stop[0]
        ids = torch.tensor([[fill] * (longest - len(p)) + p for p in prompts], device=self.device)
        mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts])
        torch.manual_seed(seed)
        sampling = {"do_sample": True, "temperature": temperature} if temperature else {}
        written = self.model.generate(
            ids, attention_mask=mask.to(self.device), max_new_tokens=new_tokens, top_k=0,
            eos_token_id=list(self.stop), pad_token_id=fill, **({"do_sample": False} | sampling),
        )[:, longest:].tolist()  # fmt: skip
        ends = [next((i + 1 for i, t in enumerate(a) if t in self.stop), len(a)) for a in written]
        return [answer[:end] for answer, end in zip(written, ends, strict=True)]


def write(chat: Chat, prompts: Sequence[str], asked: argparse.Namespace, file: Path) -> int:
    """Write the conversations that begin with ``prompts``; return how many tokens were answered."""
    tokens = 0
    with file.open("w") as output:
        for start in range(0, len(prompts), asked.batch_size):
            part = prompts[start : start + asked.batch_size]
            temperature = TEMPERATURES[start // asked.batch_size % len(TEMPERATURES)]
            messages = [[{"role": "user", "content": prompt}] for prompt in part]
            second = list(follow_ups(len(part) // 2, seed=start))
            for turn in range(2):
                chats = messages if turn == 0 else messages[: len(second)]
                opened = [chat.opened(messages) for messages in chats]
                seed = 2 * start + turn
                answers = chat.answers(opened, asked.new_tokens, temperature, seed)
                for i, (prompt, answer) in enumerate(zip(opened, answers, strict=True)):
                    line = {"ids": prompt + answer, "loss_from": len(prompt)}
                    output.write(json.dumps(line) + "\n")
                    tokens += len(answer)
                    text = chat.tokenizer.decode([t for t in answer if t not in chat.stop])
                    messages[i].append({"role": "assistant", "content": text})
                for chat_messages, question in zip(messages, second, strict=False):
                    chat_messages.append({"role": "user", "content": question})
            print(
                f"{file.name}: {start + len(part)} of {len(prompts)}, {tokens} tokens", flush=True
            )
    return tokens


def main() -> None:
    """Write the three files."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--count", type=int, default=8192)
    parser.add_argument("--batch-size", type=int, default=1024)
    parser.add_argument("--new-tokens", type=int, default=256)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32")
    asked = parser.parse_args()
    asked.output.mkdir(parents=True, exist_ok=True)
    chat = Chat(asked.model, asked.device, asked.dtype)
    held_out = chat_prompts(HELD_OUT, held_out=True)
    with (asked.output / "prompts.jsonl").open("w") as output:
        for i, prompt in enumerate(held_out):
            line = {"id": f"held-out-{i}", "messages": [{"role": "user", "content": prompt}]}
            output.write(json.dumps(line) + "\n")
    write(chat, held_out, asked, asked.output / "held_out.jsonl")
    write(chat, chat_prompts(asked.count, held_out=False), asked, asked.output / "train.jsonl")


if __name__ == "__main__":
    main()
