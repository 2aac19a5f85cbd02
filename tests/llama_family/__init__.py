"""A dense toy family, made by docs/developers/add-a-family.md: LLaMA on the CPU."""
