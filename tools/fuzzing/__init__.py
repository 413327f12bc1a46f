"""Broken and hostile input for every socket of a running server, and checks that the server does not mind."""
