"""The state machine of a gateway: its clients' sessions, which own each request's epochs."""
