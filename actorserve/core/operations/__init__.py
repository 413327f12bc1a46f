"""What operators ask of a running server: the verbs, and what every core needs to answer them."""
