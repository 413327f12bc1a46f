"""Tool calls: the forms in which families of models write them."""
