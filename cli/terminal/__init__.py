"""Console, progress bars, files that commands read, and how failures are shown."""
