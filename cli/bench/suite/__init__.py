"""``bench suite``: scenarios with thresholds and verdicts."""
