"""SpecPV: verification over a partial view of the caches."""
