"""Granite: a Llama with constant factors on embeddings, residuals, scores and logits."""
