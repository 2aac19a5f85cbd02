"""Console, progress bars, input files, and the display of failures."""
