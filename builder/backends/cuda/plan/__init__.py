"""The plan: launches and a location for every tensor. It is written, read, and run on a CPU."""
