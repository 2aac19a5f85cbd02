"""Llama and similar models: grouped-query attention, and a SwiGLU or routed experts."""
