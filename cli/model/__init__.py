"""MODEL on a command line: an engine, a checkpoint, a GGUF file or a Hugging Face model."""
