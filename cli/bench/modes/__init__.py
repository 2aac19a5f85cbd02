"""One checkpoint's modes beside each other: without a draft, with one, SpecPV, latents, DSA."""
