"""Measures the tactics of an engine's shapes and relowers its plan with the fastest."""
