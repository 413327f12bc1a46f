"""``tools/simulate provision``: the sizes of clusters that hold the service levels at a load, and the best of them."""
