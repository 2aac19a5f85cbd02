"""Phi-3 and Phi-4: a Llama with fused projections in the checkpoint."""
