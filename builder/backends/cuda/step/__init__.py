"""Builds the programs of an engine: prompt chunks, decode steps and scoring."""
