"""How long outputs are expected to be, learned from requests that ended."""
