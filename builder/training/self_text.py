"""Text that the target writes itself: what its draft will have to predict."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from specbuild.builder.training.config import SelfText
from specbuild.builder.training.corpus import Rows, Stream

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from specbuild.builder.progress import Progress

LONGEST_PROMPT = 32


@dataclass(frozen=True, kw_only=True)
class Generation:
    """How continuations are drawn: greedy at temperature 0; a row ends with an id of ``stop``."""

    new_tokens: int
    temperature: float = 0.0
    stop: tuple[int, ...] = ()
    seed: int = 0
    batch_size: int = 64


@torch.no_grad()
def generate_text(
    model: PreTrainedModel, prompts: torch.Tensor, generation: Generation, progress: Progress
) -> tuple[torch.Tensor, torch.Tensor]:
    """Continuations of ``prompts`` [N, P]: ids [N, P + new_tokens] and lengths [N].

    What follows a stop id repeats that id and lies beyond the row's length.
    """
    device = next(model.parameters()).device
    generator = torch.Generator(device).manual_seed(generation.seed)
    progress.start("target's own text", len(prompts), "rows")
    ids, lengths = [], []
    for part in prompts.split(generation.batch_size):
        written, length = _continue(model, part.to(device), generation, generator)
        ids.append(written.cpu())
        lengths.append(length.cpu())
        progress.advance(len(part))
    return torch.cat(ids), torch.cat(lengths)


def _continue(
    model: PreTrainedModel,
    prompts: torch.Tensor,
    generation: Generation,
    generator: torch.Generator,
) -> tuple[torch.Tensor, torch.Tensor]:
    from transformers import DynamicCache

    stop = torch.tensor(generation.stop, dtype=torch.long, device=prompts.device)
    cache = DynamicCache(config=model.config)
    ended = torch.zeros(len(prompts), dtype=torch.bool, device=prompts.device)
    length = torch.full_like(prompts[:, 0], prompts.shape[1])
    written, token = [prompts], prompts
    for _ in range(generation.new_tokens):
        output = model(token, past_key_values=cache, use_cache=True, logits_to_keep=1)
        drawn = _draw(output.logits[:, -1].float(), generation.temperature, generator)
        token = torch.where(ended[:, None], written[-1][:, -1:], drawn)
        length = length + ~ended
        ended = ended | torch.isin(token[:, 0], stop)
        written.append(token)
    return torch.cat(written, dim=1), length


def _draw(logits: torch.Tensor, temperature: float, generator: torch.Generator) -> torch.Tensor:
    if temperature == 0:
        return logits.argmax(dim=-1, keepdim=True)
    p = (logits / temperature).softmax(dim=-1)
    return torch.multinomial(p, 1, generator=generator)


def write_rows(
    model: PreTrainedModel,
    stream: Stream,
    options: SelfText,
    *,
    length: int,
    stop: tuple[int, ...],
    seed: int,
    progress: Progress,
) -> Rows:
    """``options.count`` rows of ``length``: a piece of the stream and what the target says next.

    Only predictions within the continuation count, and none after its end.
    """
    prompt = options.prompt_tokens or max(1, min(LONGEST_PROMPT, length // 4))
    starts = np.random.default_rng(seed).integers(0, len(stream.ids) - prompt + 1, options.count)
    prompts = torch.from_numpy(stream.ids[starts[:, None] + np.arange(prompt)].astype(np.int64))
    generation = Generation(
        new_tokens=length - prompt,
        temperature=options.temperature,
        stop=stop,
        seed=seed,
        batch_size=options.batch_size,
    )
    ids, lengths = generate_text(model, prompts, generation, progress)
    position = np.arange(length)
    counted = (position >= prompt - 1) & (position < lengths.numpy()[:, None] - 1)
    return Rows(ids.numpy().astype(np.int32), counted)


def no_rows(length: int) -> Rows:
    """Rows of none."""
    return Rows(np.empty((0, length), np.int32), np.empty((0, length), bool))
