"""Predicts the latencies of a server from an engine's costs."""
