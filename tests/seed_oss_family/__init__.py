"""A dense toy family, made by docs/developers/add-a-family.md: Seed-OSS on the CPU."""
