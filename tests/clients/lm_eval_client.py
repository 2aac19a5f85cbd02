"""lm_eval's local-completions on a task of a folder: the answers' scores, as JSON.

Usage: lm_eval_client.py URL FOLDER. The folder has task.yaml and its questions.
"""

from __future__ import annotations

import json
import os
import sys


def main(url: str, folder: str) -> None:
    """Print the log-likelihoods of all choices and the accuracy."""
    os.environ["HF_DATASETS_OFFLINE"] = os.environ["HF_HUB_OFFLINE"] = "1"
    os.environ["HF_HOME"] = folder
    from lm_eval import simple_evaluate  # type: ignore[import-not-found]
    from lm_eval.tasks import TaskManager  # type: ignore[import-not-found]

    arguments = {
        "model": "toy", "base_url": f"{url}/v1/completions", "tokenizer_backend": "remote",
        "num_concurrent": 4, "max_retries": 1, "max_length": 256,
    }  # fmt: skip
    found = simple_evaluate(
        model="local-completions",
        model_args=arguments,
        tasks=["letters"],
        task_manager=TaskManager(include_path=folder, include_defaults=False),
        bootstrap_iters=0,
        log_samples=True,
    )
    samples = sorted(found["samples"]["letters"], key=lambda sample: sample["doc_id"])
    scores = [[float(r[0][0]) for r in sample["resps"]] for sample in samples]
    print(json.dumps({"scores": scores, "acc": found["results"]["letters"]["acc,none"]}))


if __name__ == "__main__":
    main(*sys.argv[1:])
