"""Predicts a server's latency and throughput: its scheduler with measured costs, without a GPU."""
