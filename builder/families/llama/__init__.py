"""Llama, Qwen3 and Qwen3-MoE: grouped-query attention, and a SwiGLU or routed experts."""
