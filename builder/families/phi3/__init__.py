"""Phi-3 and Phi-4: a Llama whose projections are stored together."""
