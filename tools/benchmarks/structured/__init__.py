"""What structured output costs, and whether its answers are valid."""
