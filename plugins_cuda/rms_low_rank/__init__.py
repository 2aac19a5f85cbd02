"""The fused op of a layer's low-rank projections (MLA), for queries and cache entries."""
