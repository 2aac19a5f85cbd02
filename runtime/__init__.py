"""The light runtime: loads an engine directory and decodes with it; numpy is all it imports."""

FORMAT_VERSION = 3
