"""What a server of an engine will do, by its costs."""
