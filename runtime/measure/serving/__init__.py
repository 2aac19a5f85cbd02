"""What a server will do: its scheduler over measured costs, without a machine."""
