"""A dense toy family, made by docs/developers/add-a-family.md: Mistral on the CPU."""
