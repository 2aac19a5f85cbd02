"""What an output's tokens mean: text, reasoning, and calls of tools. One file for each form."""
