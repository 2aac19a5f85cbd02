"""The fused op of a layer's low-rank projections (MLA), queries and cache entries."""
