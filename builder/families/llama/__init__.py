"""Llama and its kin: grouped-query attention, and a SwiGLU or routed experts."""
