"""How copies of KV between simulated instances use the links of their machines."""
