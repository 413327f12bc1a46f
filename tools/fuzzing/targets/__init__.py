"""The sockets of a server, and what is sent to them."""
