"""Measures verification over partial views: by context, budget, and correction of sinks.

The example model (or another GPT-OSS) evaluates a text in full, and everything after the first
positions again over views, one buffer at a time. A full step selects blocks for the queries before
it, and the next 48 positions attend to the sink, these blocks and the window. The output has the
agreement of the likeliest tokens, the divergence of their distributions, the loss, and the standard
errors of all three (for the loss, that of the difference), by the length of the context:

    .venv/bin/python benchmarks/specpv_quality.py --ids out/corpus/held_out.npy --samples 8 \\
        --budgets 4 8 16 32 64 --output benchmarks/results/specpv-quality.json

``--ids`` are token ids, [tokens] or [n, tokens]: text that the model was not trained on, such as
``held_out.npy`` of examples/tiny-gpt-oss/corpus.py, or ``recall.npy`` of its recall_text.py, in
which only the end needs earlier text (``--from 3700``).

A view drops keys but not the learned sink, whose share of the softmax rises. ``--corrections``
compares no correction (``none``) with adding the dropped blocks' weight to the denominator:
estimated from their summaries (``summaries``), or exactly (``exact``, which no engine has).
"""

from __future__ import annotations

import argparse
import json
import sysconfig
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn import functional as F

from specbuild.plugins_cuda.kv_block_select.op import block_scores

EXAMPLE = Path(__file__).parents[1] / "examples" / "tiny-gpt-oss" / "target"
CORRECTIONS = ("none", "summaries", "exact")
# Positions evaluated at once if everything is attended to anyway.
_CHUNK = 480


@dataclass(frozen=True)
class View:
    """A view of blocks of ``block`` tokens for the last ``rows`` positions.

    The ``asking`` positions before them are the queries of the full step that selected it.
    """

    budget: int
    correction: str = "none"
    block: int = 16
    sink: int = 2
    window: int = 8
    rows: int = 48
    asking: int = 4


@dataclass
class Shares:
    """The sink's share of the softmax on the rows of a view, layer by layer."""

    whole: list[float] = field(default_factory=list)
    viewed: list[float] = field(default_factory=list)


def hidden_blocks(asking: torch.Tensor, key: torch.Tensor, view: View) -> torch.Tensor:
    """Return the tokens that each KV head's view omits, bool [kv_heads, T].

    ``asking`` [heads, asking, D] are the full step's queries, before the last ``view.rows`` of the
    keys ``key`` [kv_heads, T, D]; both have RoPE applied.
    """
    kv_heads, tokens, width = key.shape
    length = tokens - view.rows
    start = view.sink * view.block
    blocks = max(0, (length - start) // view.block - view.window)
    hidden = torch.zeros(kv_heads, tokens, dtype=torch.bool)
    if blocks == 0:
        return hidden
    end = start + blocks * view.block
    grouped = key[:, start:end].view(kv_heads, blocks, view.block, width)
    summaries = torch.stack([grouped.amax(2), grouped.amin(2)], dim=2).transpose(0, 1)
    queries = asking.transpose(0, 1).unflatten(1, (kv_heads, -1))
    scores = block_scores(queries, summaries, reduction="mean", score="dot")
    chosen = scores.topk(min(view.budget, blocks)).indices
    dropped = torch.ones(kv_heads, blocks, dtype=torch.bool).scatter(1, chosen, False)
    hidden[:, start:end] = dropped.repeat_interleave(view.block, dim=1)
    return hidden


def dropped_weight(  # noqa: PLR0917
    query: torch.Tensor,
    key: torch.Tensor,
    hidden: torch.Tensor,
    logits: torch.Tensor,
    view: View,
    scaling: float,
) -> torch.Tensor:
    """Return the log-sum-exp of omitted tokens, [heads, rows]: exact, or by block means."""
    heads, rows = logits.shape[:2]
    group = heads // key.shape[0]
    if view.correction == "exact":
        out = hidden.repeat_interleave(group, 0).unsqueeze(1)
        return logits.masked_fill(~out, -torch.inf).logsumexp(-1)
    start = view.sink * view.block
    blocks = (key.shape[1] - start) // view.block
    grouped = key[:, start : start + blocks * view.block].unflatten(1, (blocks, view.block))
    middle = (grouped.amax(2) + grouped.amin(2)) / 2
    dropped = hidden[:, start : start + blocks * view.block : view.block]
    estimate = torch.einsum("hrd,hbd->hrb", query[:, -rows:], middle.repeat_interleave(group, 0))
    estimate = estimate * scaling + torch.tensor(float(view.block)).log()
    unseen = dropped.repeat_interleave(group, 0).unsqueeze(1)
    return estimate.masked_fill(~unseen, -torch.inf).logsumexp(-1)


class Attention:
    """Replaces transformers' attention of GPT-OSS: full layers may use views on all rows.

    ``asking`` are the last queries of each full layer that attended to everything.
    """

    def __init__(self, rows_that_ask: int) -> None:
        from transformers.models.gpt_oss import modeling_gpt_oss

        self._module = modeling_gpt_oss
        self._whole = modeling_gpt_oss.eager_attention_forward
        self._rows = rows_that_ask
        self.asking: dict[int, torch.Tensor] = {}
        self.view: View | None = None
        self.shares = Shares()

    @contextmanager
    def placed(self) -> Iterator[None]:
        """Replace transformers' attention inside the context."""
        self._module.eager_attention_forward = self
        try:
            yield
        finally:
            self._module.eager_attention_forward = self._whole

    def __call__(  # noqa: PLR0917
        self, module: Any, query: Any, key: Any, value: Any, mask: Any, scaling: float, **rest: Any
    ) -> Any:
        """See ``eager_attention_forward``."""
        if module.sliding_window is not None or self.view is None:
            if module.sliding_window is None:
                self.asking[module.layer_idx] = query[0, :, -self._rows :].float()
            return self._whole(module, query, key, value, mask, scaling, **rest)
        view, q, k = self.view, query[0].float(), key[0].float()
        hidden = hidden_blocks(self.asking[module.layer_idx], k, view)
        group, rows = module.num_key_value_groups, q.shape[1]
        logits = q @ k.repeat_interleave(group, 0).transpose(1, 2) * scaling + mask[0]
        sink = module.sinks.float().view(-1, 1, 1).expand(-1, rows, 1)
        self.shares.whole.append(_sinks_share([logits, sink], logits.shape[-1]))
        parts = [
            logits.masked_fill(hidden.repeat_interleave(group, 0).unsqueeze(1), -torch.inf),
            sink,
        ]
        if view.correction != "none" and hidden.any():
            parts.append(dropped_weight(q, k, hidden, logits, view, scaling).unsqueeze(-1))
        share = torch.cat(parts, -1).softmax(-1)
        self.shares.viewed.append(_sinks_share(parts, logits.shape[-1]))
        seen = share[..., : logits.shape[-1]] @ value[0].float().repeat_interleave(group, 0)
        return seen.transpose(0, 1).unsqueeze(0).to(query.dtype), share


def _sinks_share(parts: Sequence[torch.Tensor], column: int) -> float:
    return torch.cat(list(parts), -1).softmax(-1)[..., column].mean().item()


@dataclass(frozen=True)
class Piece:
    """``rows`` positions after ``context``: means over them, in full and over one view."""

    context: int
    blocks: int
    same: float
    divergence: float
    loss_whole: float
    loss: float
    sink_whole: float
    sink: float


class Reader:
    """A model that evaluates a text in pieces, each once in full and once over each view."""

    def __init__(self, model: Any, views: Sequence[View]) -> None:
        self.model, self.views = model, views
        self.attention = Attention(views[0].asking)

    @torch.inference_mode()
    def pieces(self, ids: torch.Tensor, start: int) -> Iterator[tuple[View, Piece]]:
        """Yield all complete pieces of ids [T + 1] after the first ``start``, with every view."""
        from transformers import DynamicCache

        # Without a configuration the cache keeps all keys of sliding layers, which are masked.
        cache, rows = DynamicCache(), self.views[0].rows
        with self.attention.placed():
            for chunk in ids[:start].split(_CHUNK):
                self._read(chunk, cache, None)
            for at in range(start, len(ids) - rows, rows):
                piece, following = ids[at : at + rows], ids[at + 1 : at + rows + 1]
                viewed = []
                for view in self.views:
                    self.attention.shares = Shares()
                    viewed.append((self._read(piece, cache, view), self.attention.shares))
                    cache.crop(-rows)
                whole = self._read(piece, cache, None)
                for view, (logits, shares) in zip(self.views, viewed, strict=True):
                    yield view, _piece(at, view, whole, logits, following, shares)

    def _read(self, ids: torch.Tensor, cache: Any, view: View | None) -> torch.Tensor:
        """Return log-probabilities [n, V] after ids [n]."""
        self.attention.view = view
        logits = self.model(ids[None], past_key_values=cache, use_cache=True).logits[0]
        return logits.float().log_softmax(-1)


def _piece(  # noqa: PLR0917
    at: int,
    view: View,
    whole: torch.Tensor,
    logits: torch.Tensor,
    following: torch.Tensor,
    shares: Shares,
) -> Piece:
    blocks = max(0, (at - view.sink * view.block) // view.block - view.window)
    return Piece(
        context=at,
        blocks=blocks,
        same=float((whole.argmax(-1) == logits.argmax(-1)).float().mean()),
        divergence=float(F.kl_div(logits, whole, reduction="batchmean", log_target=True)),
        loss_whole=float(F.nll_loss(whole, following)),
        loss=float(F.nll_loss(logits, following)),
        sink_whole=float(np.mean(shares.whole)),
        sink=float(np.mean(shares.viewed)),
    )


def summary(view: View, low: int, high: int, pieces: Sequence[Piece]) -> dict[str, Any]:
    """Return means over pieces at contexts of [low, high), and standard errors over pieces."""

    def error(values: list[float]) -> float:
        return float(np.std(values, ddof=1) / len(values) ** 0.5) if len(values) > 1 else 0.0

    means = {
        name: float(np.mean([getattr(p, name) for p in pieces]))
        for name in ("blocks", "same", "divergence", "loss_whole", "loss", "sink_whole", "sink")
    }
    return {
        "from": low,
        "to": high,
        "budget": view.budget,
        "correction": view.correction,
        "positions": len(pieces) * view.rows,
        **means,
        "same_error": error([p.same for p in pieces]),
        "divergence_error": error([p.divergence for p in pieces]),
        # Both losses are of the same tokens, so their difference has a smaller error than either.
        "loss_added_error": error([p.loss - p.loss_whole for p in pieces]),
    }


def line(row: dict[str, Any]) -> str:
    """Return a summary as printed text."""
    added = row["loss"] - row["loss_whole"]
    return (
        f"{row['from']:5}–{row['to']:<5} {row['budget']:4} of {row['blocks']:<4.0f} "
        f"{row['correction']:9} {row['positions']:6}   "
        f"{row['same']:6.2%} ± {row['same_error']:5.2%}  "
        f"{row['divergence']:6.4f} ± {row['divergence_error']:6.4f}  "
        f"{row['loss_whole']:6.3f} + {added:6.4f} ± {row['loss_added_error']:6.4f}  "
        f"{row['sink_whole']:5.1%} → {row['sink']:5.1%}"
    )


def library_text(tokenizer: Any, length: int, count: int) -> list[torch.Tensor]:
    """Return the starts of ``count`` long files of the standard library, [length + 1] ids each."""
    library = Path(sysconfig.get_paths()["stdlib"])
    result: list[torch.Tensor] = []
    for file in sorted(library.glob("*.py")):
        text = file.read_text(encoding="utf-8", errors="replace")
        if len(text) < 4 * length:
            continue
        ids = tokenizer(text[: 8 * length])["input_ids"]
        if len(ids) > length:
            result.append(torch.tensor(ids[: length + 1]))
        if len(result) == count:
            break
    return result


def stored_text(file: Path, length: int, count: int) -> list[torch.Tensor]:
    """Return ``count`` rows of a file of token ids, or pieces of its text at equal distances."""
    ids = np.load(file).astype(np.int64)
    if ids.ndim == 1:
        starts = np.linspace(0, len(ids) - length - 1, count).astype(int)
        ids = np.stack([ids[start : start + length + 1] for start in starts])
    return [torch.from_numpy(row[: length + 1]) for row in ids[:count]]


def main() -> None:
    """Print one row for each range of contexts, budget and correction."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, default=EXAMPLE)
    parser.add_argument("--from", type=int, default=512, dest="start", help="context to start at")
    parser.add_argument("--contexts", type=int, nargs="+", default=[1024, 2048, 3072, 4096])
    parser.add_argument("--budgets", type=int, nargs="+", default=[4, 8, 16, 32, 64])
    parser.add_argument("--corrections", nargs="+", choices=CORRECTIONS, default=["none"])
    parser.add_argument("--samples", type=int, default=4, help="texts to read")
    parser.add_argument("--ids", type=Path, help="token ids in place of the library")
    parser.add_argument("--output", type=Path, metavar="FILE.json")
    inputs = parser.parse_args()
    from transformers import AutoTokenizer, GptOssForCausalLM

    model = GptOssForCausalLM.from_pretrained(inputs.model, attn_implementation="eager").float()
    model.eval()
    length = inputs.contexts[-1]
    if inputs.ids is None:
        tokenizer = AutoTokenizer.from_pretrained(inputs.model)
        texts = library_text(tokenizer, length, inputs.samples)
    else:
        texts = stored_text(inputs.ids, length, inputs.samples)
    views = [View(b, c) for b in inputs.budgets for c in inputs.corrections]
    reader = Reader(model, views)
    pieces = [pair for ids in texts for pair in reader.pieces(ids, inputs.start)]
    rows = []
    print("context      blocks      correction positions  same token        divergence, nats   "
          "loss, whole + added         sink's share")  # fmt: skip
    for low, high in pairwise([inputs.start, *inputs.contexts]):
        for view in views:
            own = [p for v, p in pieces if v == view and low <= p.context < high]
            if own:
                rows.append(summary(view, low, high, own))
                print(line(rows[-1]), flush=True)
    if inputs.output is not None:
        inputs.output.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
