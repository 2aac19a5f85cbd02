"""MiniMax-M2: norms over all heads together, and 256 routed experts."""
