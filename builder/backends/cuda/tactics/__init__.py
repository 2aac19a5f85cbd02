"""Which kernel a launch takes: tactics, their files and their choice."""
