"""Layer functions: linear layers in floats and in integers, norms and gates, and the row tiles that keep their bits."""
