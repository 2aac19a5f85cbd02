"""Programs of op calls: a prompt chunk, a step, scores."""
