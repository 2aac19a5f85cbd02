"""The accepted rows that the next launch applies to recurrent states."""
