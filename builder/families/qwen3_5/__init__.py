"""Qwen3.5 and Qwen3-Next: gated delta nets in three of four layers, dense or with experts."""
