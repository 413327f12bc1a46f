"""KV between hosts with keys: encrypted ZeroMQ sockets, in place of the stream sockets of ``data_server``."""
