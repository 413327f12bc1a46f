"""What a name, an address and a public key in the cluster's file look like."""

import ipaddress
import re
from typing import Final

MAX_NAME_CHARS: Final = 64
_NAME: Final = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?", re.ASCII)
_HOST_NAME: Final = re.compile(r"(?!-)[A-Za-z0-9_-]{1,63}(?<!-)(\.(?!-)[A-Za-z0-9_-]{1,63}(?<!-))*\.?", re.ASCII)
_KEY: Final = re.compile(r"[0-9a-zA-Z.\-:+=^!/*?&<>()\[\]{}@%$#]{40}", re.ASCII)  # Z85 of 32 bytes
_MAX_HOST_NAME_CHARS: Final = 253
_NOT_A_HOST: Final = "coordinator"  # the name of a process, which has no host in its name


def check_id(text: str) -> str:
    """Raises: ValueError unless ``text`` can be a cluster's id."""
    return _check_word(text)


def check_name(text: str) -> str:
    """Raises: ValueError unless ``text`` can name a host, an operator or a viewer."""
    if text == _NOT_A_HOST:
        raise ValueError(f'"{_NOT_A_HOST}" is the name of a process')
    return _check_word(text)


def _check_word(text: str) -> str:
    if _NAME.fullmatch(text) is None or len(text) > MAX_NAME_CHARS:
        raise ValueError(
            f"expected at most {MAX_NAME_CHARS} letters, digits, dots, dashes and underscores, which begin and end "
            "with a letter or a digit"
        )
    return text


def check_address(text: str) -> str:
    """Raises: ValueError unless ``text`` is an IP address, or a name that may have one; without a scheme or port."""
    address = ip_address(text)
    if address is None:
        looks_numeric = text.replace(".", "").isdecimal()
        if looks_numeric or len(text) > _MAX_HOST_NAME_CHARS or _HOST_NAME.fullmatch(text) is None:
            raise ValueError("expected an IP address or a host's name, without a port")
    return text


def check_reachable(text: str) -> str:
    """As ``check_address``. Raises: ValueError also for an address to which no process can connect."""
    address = ip_address(check_address(text))
    if address is not None and (address.is_unspecified or address.is_multicast):
        raise ValueError("expected the address at which other hosts reach this host; `bind` says where it listens")
    return text


def check_key(text: str) -> str:
    """Raises: ValueError, which does not repeat the text, unless it can be a public key."""
    if _KEY.fullmatch(text) is None:
        raise ValueError("expected the 40 characters of a public key")
    return text


def ip_address(text: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """The address; None for a name."""
    try:
        return ipaddress.ip_address(text)
    except ValueError:
        return None
