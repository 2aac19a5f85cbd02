"""DeepSeek: latent attention, and a dense MLP before routed experts."""
