"""Measurements of the gateway process: many streams, many clients, and refusals."""
