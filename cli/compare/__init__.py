"""What two engines cost and give, measured against each other."""
