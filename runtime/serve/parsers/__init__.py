"""Parsers of outputs: content, reasoning and tool calls. One file for each format."""
