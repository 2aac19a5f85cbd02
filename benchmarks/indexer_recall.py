"""Measures how many selected tokens an indexer still selects with rounded keys.

See docs/smaller-caches.md. Keys, queries and weights of every layer with an indexer are computed
from the model's inputs on real text. The selection of a row by keys in fp32 is compared with that
by keys in bf16, in fp8 as in an engine, and in fp8 with a scale per key.

    python benchmarks/indexer_recall.py examples/tiny-gpt-oss/target
        examples/tiny-gpt-oss/dsa/dsa_indexer.safetensors text.txt --top-k 128 256
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from pathlib import Path

import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from specbuild.builder.checkpoint.indexers import HEAD_WEIGHTS, KEYS, QUERIES, indexer_name
from specbuild.plugins_cuda.dsa_indexer.key_types import E4M3_MOST, as_cached, key_values
from specbuild.plugins_cuda.dsa_indexer.reference import indexer_scores

FP8_POOL = torch.empty(0, dtype=torch.uint8)


def rounded(keys: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return keys [S, d] in the forms in which they may be cached."""
    scale = E4M3_MOST / keys.abs().amax(1, keepdim=True)
    return {
        "bf16": keys.bfloat16().float(),
        "fp8": key_values(as_cached(keys, FP8_POOL)),
        "fp8, a scale a key": key_values(as_cached(keys * scale, FP8_POOL)) / scale,
    }


def inputs_of(model: torch.nn.Module, ids: torch.Tensor) -> dict[int, torch.Tensor]:
    """Return the normed inputs [T, H] of every layer's attention."""
    result: dict[int, torch.Tensor] = {}
    hooks = [
        layer.input_layernorm.register_forward_hook(
            lambda _module, _given, out, i=i: result.__setitem__(i, out[0].bfloat16().float())
        )
        for i, layer in enumerate(model.model.layers)
    ]
    with torch.no_grad():
        model(ids[None])
    for hook in hooks:
        hook.remove()
    return result


def main() -> None:
    """Print a line for every number of selected tokens and form of keys."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("indexers", type=Path)
    parser.add_argument("text", type=Path)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--sequences", type=int, default=2)
    parser.add_argument("--top-k", type=int, nargs="+", default=[128, 256])
    args = parser.parse_args()
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32).eval()
    ids = AutoTokenizer.from_pretrained(args.model)(args.text.read_text()).input_ids
    tensors = load_file(args.indexers)
    result: dict[tuple[int, str], list[float]] = defaultdict(list)
    for first in range(0, args.sequences * args.tokens, args.tokens):
        hidden = inputs_of(model, torch.tensor(ids[first : first + args.tokens]))
        for layer in sorted({int(name.split(".")[2]) for name in tensors}):
            x = hidden[layer]
            w_q, w_k, w_h = (
                tensors[indexer_name(layer, part)].float() for part in (QUERIES, KEYS, HEAD_WEIGHTS)
            )
            rows = slice(len(x) // 2, len(x))
            q = (x[rows] @ w_q).bfloat16().float().unflatten(1, (w_h.shape[1], -1))
            weights, keys = (x[rows] @ w_h).bfloat16().float(), x @ w_k
            seen = torch.arange(len(x)) <= torch.arange(len(x))[rows, None]

            def best(by: torch.Tensor, k: int) -> torch.Tensor:
                scores = indexer_scores(q, by, weights).masked_fill(~seen, -torch.inf)  # noqa: B023
                return torch.zeros_like(seen).scatter_(1, scores.topk(k).indices, True)  # noqa: B023

            for k in args.top_k:
                requested = best(keys, k)
                for name, cached in rounded(keys).items():
                    share = (best(cached, k) & requested).sum() / requested.sum()
                    result[k, name].append(float(share))
    for (k, name), shares in result.items():
        mean, minimum = sum(shares) / len(shares), min(shares)
        print(f"top {k}, {name}: {mean:.2%} on average, {minimum:.2%} in the worst layer")


if __name__ == "__main__":
    main()
