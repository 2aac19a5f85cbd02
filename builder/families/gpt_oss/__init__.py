"""GPT-OSS."""
