"""API keys: the one that a call brings, and whether it is one of the server's."""

import hashlib
import secrets
from collections.abc import Iterable


def given_key(headers: Iterable[tuple[str | bytes, str | bytes]]) -> str:
    """The key in `authorization: Bearer KEY` or `x-api-key: KEY`, whichever stands first.

    Args:
      headers: with names in lower case, as HTTP servers (bytes) and gRPC's metadata have them.

    Returns:
      "" without a key.
    """
    for name, value in headers:
        match _text(name):
            case "authorization":
                kind, _, key = _text(value).partition(" ")
                return key.strip() if kind.lower() == "bearer" else ""
            case "x-api-key":
                return _text(value)
    return ""


class ApiKeys:
    """The keys that open a server; it is open to all if there are none.

    Args:
      keys: ASCII and not empty.
    """

    def __init__(self, keys: Iterable[str]):
        self._digests = [_digest(key) for key in keys]

    def __bool__(self) -> bool:
        return bool(self._digests)

    def __contains__(self, key: str) -> bool:
        """Whether `key` is one of them, in a time that tells nothing of them."""
        digest = _digest(key)
        # All are compared, each in constant time.
        return sum([secrets.compare_digest(digest, known) for known in self._digests]) > 0


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogatepass")).digest()


def _text(value: str | bytes) -> str:
    return value if isinstance(value, str) else value.decode("latin-1")
