"""Servers that serve while their processes are restarted."""
