"""ZeroMQ addresses: which of them other machines can reach."""

import ipaddress


def is_reachable_from_elsewhere(address: str) -> bool:
    """Whether a socket at ``address`` may carry bytes beyond this machine: any ``tcp://`` that is not loopback's."""
    if not address.startswith("tcp://"):
        return False
    host = address.removeprefix("tcp://").rpartition(":")[0].strip("[]")
    if host == "localhost":
        return False
    try:
        return not ipaddress.ip_address(host).is_loopback
    except ValueError:
        return True  # a name, an interface, or *
