"""What verification over partial views changes: by context, budget, and sinks' correction.

The example model (or another GPT-OSS) reads text of its standard library whole, and again with the
last positions seeing what a SpecPV view shows them: sink, chosen blocks, window. Printed is how
often both choose the same token, the divergence of their distributions, and the loss:

    .venv/bin/python benchmarks/specpv_quality.py --contexts 1024 2048 4000 --budgets 8 16 32 64

``--ids`` takes ``recall.npy`` of examples/tiny-gpt-oss/recall_text.py: text that asks at its end
for what stands at its beginning (with ``--contexts 4096``, its whole length).

A view drops keys but not the learned sink, whose share of the softmax rises. ``--corrections``
compares doing nothing (``none``) with giving the dropped blocks' weight back to the denominator:
estimated from their summaries (``summaries``), or as it is (``exact``, which no engine has).
"""

from __future__ import annotations

import argparse
import sysconfig
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn import functional as F

from specbuild.plugins_cuda.kv_block_select.op import block_scores

EXAMPLE = Path(__file__).parents[1] / "examples" / "tiny-gpt-oss" / "target"
CORRECTIONS = ("none", "summaries", "exact")


@dataclass(frozen=True)
class View:
    """A view of blocks of ``block`` tokens; the last ``rows`` positions see no more than it.

    The ``asking`` positions in front of them are the queries of the full step that chose it.
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
    """The sink's mean share of the softmax on the rows that a view serves, layer by layer."""

    whole: list[float] = field(default_factory=list)
    viewed: list[float] = field(default_factory=list)


def hidden_blocks(query: torch.Tensor, key: torch.Tensor, view: View) -> torch.Tensor:
    """Which tokens each KV head's view leaves out, bool [kv_heads, T].

    ``query`` [heads, T, D] and ``key`` [kv_heads, T, D], rotated.
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
    asking = query[:, length - view.asking : length].transpose(0, 1)
    queries = asking.unflatten(1, (kv_heads, -1))
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
    """Log-sum-exp of what a view leaves out, [heads, rows]: exact, or by the blocks' middles."""
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


@contextmanager
def viewed(view: View, shares: Shares) -> Iterator[None]:
    """Full-attention layers of GPT-OSS attend as a partial step does, on the last rows."""
    from transformers.models.gpt_oss import modeling_gpt_oss as gpt_oss

    whole = gpt_oss.eager_attention_forward

    def attend(  # noqa: PLR0917
        module: Any, query: Any, key: Any, value: Any, mask: Any, scaling: float, **rest: Any
    ) -> Any:
        attended, weights = whole(module, query, key, value, mask, scaling, **rest)
        if module.sliding_window is not None:
            return attended, weights
        q, k = query[0].float(), key[0].float()
        hidden = hidden_blocks(q, k, view)
        group, rows = module.num_key_value_groups, view.rows
        logits = q[:, -rows:] @ k.repeat_interleave(group, 0).transpose(1, 2) * scaling
        logits = logits + mask[0, :, -rows:]
        sink = module.sinks.float().view(-1, 1, 1).expand(-1, rows, 1)
        shares.whole.append(torch.cat([logits, sink], -1).softmax(-1)[..., -1].mean().item())
        shown = logits.masked_fill(hidden.repeat_interleave(group, 0).unsqueeze(1), -torch.inf)
        parts = [shown, sink]
        if view.correction != "none" and hidden.any():
            parts.append(dropped_weight(q, k, hidden, logits, view, scaling).unsqueeze(-1))
        share = torch.cat(parts, -1).softmax(-1)
        shares.viewed.append(share[..., logits.shape[-1]].mean().item())
        seen = share[..., : logits.shape[-1]] @ value[0].float().repeat_interleave(group, 0)
        attended[0, -rows:] = seen.transpose(0, 1).to(attended.dtype)
        return attended, weights

    gpt_oss.eager_attention_forward = attend
    try:
        yield
    finally:
        gpt_oss.eager_attention_forward = whole


@dataclass
class Quality:
    """Sums over samples; :meth:`row` gives means."""

    rows: int = 0
    same: float = 0.0
    divergence: float = 0.0
    loss_whole: float = 0.0
    loss: float = 0.0
    shares: Shares = field(default_factory=Shares)

    def add(self, whole: torch.Tensor, logits: torch.Tensor, following: torch.Tensor) -> None:
        """Log-probabilities [n, V] of both, and the tokens that follow in the text."""
        self.rows += len(whole)
        self.same += float((whole.argmax(-1) == logits.argmax(-1)).sum())
        self.divergence += float(F.kl_div(logits, whole, reduction="sum", log_target=True))
        self.loss_whole += float(F.nll_loss(whole, following, reduction="sum"))
        self.loss += float(F.nll_loss(logits, following, reduction="sum"))

    def row(self) -> str:
        """Agreement, divergence, both losses, and the sink's share in whole and in part."""
        mean = [sum(s) / max(len(s), 1) for s in (self.shares.whole, self.shares.viewed)]
        n = self.rows
        return (
            f"{100 * self.same / n:9.1f} % {self.divergence / n:10.4f} {self.loss_whole / n:8.3f} "
            f"{self.loss / n:8.3f} {100 * mean[0]:8.1f} % {100 * mean[1]:6.1f} %"
        )


def samples(tokenizer: Any, context: int, count: int) -> list[torch.Tensor]:
    """Beginnings of ``count`` long files of the standard library, [context] ids each."""
    library = Path(sysconfig.get_paths()["stdlib"])
    found: list[torch.Tensor] = []
    for file in sorted(library.glob("*.py")):
        text = file.read_text(encoding="utf-8", errors="replace")
        if len(text) < 4 * context:
            continue
        ids = tokenizer(text[: 8 * context])["input_ids"]
        if len(ids) > context:
            found.append(torch.tensor(ids[: context + 1]))
        if len(found) == count:
            break
    return found


@torch.inference_mode()
def measure(model: Any, texts: Sequence[torch.Tensor], views: Sequence[View]) -> list[Quality]:
    """Every view on every text, against the same text seen whole."""
    results = [Quality() for _ in views]
    for ids in texts:
        rows = views[0].rows
        inputs, following = ids[None, :-1], ids[-rows:]
        whole = model(inputs, logits_to_keep=rows).logits[0].float().log_softmax(-1)
        for view, quality in zip(views, results, strict=True):
            with viewed(view, quality.shares):
                logits = model(inputs, logits_to_keep=rows).logits[0]
            quality.add(whole, logits.float().log_softmax(-1), following)
    return results


def main() -> None:
    """Prints one row for each context, budget and correction."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, default=EXAMPLE)
    parser.add_argument("--contexts", type=int, nargs="+", default=[1024, 2048, 4000])
    parser.add_argument("--budgets", type=int, nargs="+", default=[8, 16, 32, 64])
    parser.add_argument("--corrections", nargs="+", choices=CORRECTIONS, default=["none"])
    parser.add_argument("--samples", type=int, default=4)
    parser.add_argument("--ids", type=Path, help="token ids [n, length] in place of the library")
    given = parser.parse_args()
    from transformers import AutoTokenizer, GptOssForCausalLM

    tokenizer = AutoTokenizer.from_pretrained(given.model)
    model = GptOssForCausalLM.from_pretrained(given.model, attn_implementation="eager").float()
    model.eval()
    print(
        "context blocks correction  agreement divergence     loss  in part  sink's share, in part"
    )
    for context in given.contexts:
        if given.ids is None:
            texts = samples(tokenizer, context, given.samples)
        else:
            # What is asked stands at the end: a shorter context is the end of a longer one.
            rows = np.load(given.ids)[: given.samples, -context - 1 :]
            texts = [torch.from_numpy(row.astype(np.int64)) for row in rows]
        views = [View(b, c) for b in given.budgets for c in given.corrections]
        for view, quality in zip(views, measure(model, texts, views), strict=True):
            print(f"{context:7} {view.budget:6} {view.correction:10} {quality.row()}", flush=True)


if __name__ == "__main__":
    main()
