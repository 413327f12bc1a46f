"""One short file for each family of decoders, and the pieces that they share."""
