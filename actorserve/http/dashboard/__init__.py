"""The page to watch: instances as tiles, requests as marks that move, throughput and latency over time."""
