"""OLMo 2 and 3: norms after attention and feed-forward, and over all heads together."""
