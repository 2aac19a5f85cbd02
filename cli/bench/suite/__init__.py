"""``bench suite``: scenarios with thresholds, judged."""
