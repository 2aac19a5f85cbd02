"""Mistral, Ministral 3 and Mixtral: grouped-query attention, and a SwiGLU or routed experts."""
