"""Copies of requests' KV in another worker's host memory, so that a worker's death costs a copy."""
