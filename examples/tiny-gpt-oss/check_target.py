"""Hold the exported target against transformers on held-out text, and show greedy continuations."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from export import load_target
from model import make_positions, rms_norm
from torch import Tensor
from transformers import AutoTokenizer, GptOssForCausalLM

LOGIT_TOLERANCE = 2e-3
LOSS_TOLERANCE = 1e-4
# Where two experts tie to within rounding, either is right and that position's logits differ.
SHARE_OF_TIES = 0.01


@torch.no_grad()
def training_logits(folder: Path, ids: Tensor) -> Tensor:
    """Return the training model's float32 logits [B, T, V] of ids [B, T] with exported values."""
    model = load_target(folder)
    positions = make_positions(model.geometry, ids.shape[1], ids.device)
    x, _ = model.states(ids, positions, dtype=torch.float32, quantised=True)
    return rms_norm(x, model.norm, model.geometry.rms_eps) @ model.head.T


@torch.no_grad()
def main() -> None:
    """Compare logits and loss, then print continuations of `prompts.jsonl`."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--corpus", type=Path, required=True)
    parser.add_argument("--prompts", type=Path)
    parser.add_argument("--sequences", type=int, default=4)
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--new-tokens", type=int, default=80)
    parser.add_argument("--samples", type=int, default=6)
    args = parser.parse_args()
    reference = GptOssForCausalLM.from_pretrained(
        args.model, dtype=torch.float32, attn_implementation="eager"
    )
    # The reader leaves experts in bf16 whatever dtype is asked for, and rounds their inputs too.
    reference.float().eval()
    ids = torch.from_numpy(np.load(args.corpus / "held_out.npy").astype(np.int64))
    ids = ids[: args.sequences * args.length].reshape(args.sequences, args.length)
    expected, got = reference(ids).logits, training_logits(args.model, ids)
    losses = [
        F.cross_entropy(x[:, :-1].flatten(0, 1), ids[:, 1:].flatten()).item()
        for x in (expected, got)
    ]
    differences = (expected - got).abs().amax(-1)
    share = (differences > LOGIT_TOLERANCE).float().mean().item()
    print(
        f"loss {losses[0]:.5f} transformers, {losses[1]:.5f} training; logit differences: largest "
        f"{differences.max():.1e}, median {differences.median():.1e}, {share:.3%} above "
        f"{LOGIT_TOLERANCE:.0e}"
    )
    if share > SHARE_OF_TIES or abs(losses[0] - losses[1]) > LOSS_TOLERANCE:
        raise SystemExit(
            f"{args.model}: got losses {losses} and {share:.2%} differing positions, expected "
            f"at most {LOSS_TOLERANCE:.0e} between the losses and {SHARE_OF_TIES:.0%} of the "
            "positions; was the export changed?"
        )
    if args.prompts:
        show_continuations(reference, args)


def show_continuations(reference: GptOssForCausalLM, args: argparse.Namespace) -> None:
    """Print greedy continuations of the first prompts."""
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    for line in args.prompts.read_text().splitlines()[: args.samples]:
        prompt = json.loads(line)
        inputs = tokenizer(prompt["prompt"], return_tensors="pt")
        output = reference.generate(**inputs, max_new_tokens=args.new_tokens, do_sample=False)
        text = tokenizer.decode(output[0, inputs.input_ids.shape[1] :])
        print(f"===== {prompt['id']}\n{prompt['prompt'][-300:]}\n----- continues\n{text}")


if __name__ == "__main__":
    main()
