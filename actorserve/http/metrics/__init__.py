"""The page that Prometheus reads."""
