"""Headers of LazyGatedDelta's kernel."""
