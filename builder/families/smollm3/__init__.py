"""SmolLM3: a Llama whose every fourth layer has no RoPE."""
