"""Copies of requests' KV in another worker's host memory. After a worker's death they save recomputation."""
