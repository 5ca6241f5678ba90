"""Who shares a prefix cache with whom."""

import hashlib

from jaxllm.text.input import check_cache_salt


def tenant_salt(key: str, given: str | None) -> str:
    """The salt of the prefix cache for requests with an API key and, maybe, a salt of their own.

    It does not tell the key. All fronts of a server make it alike, so that a tenant finds its own
    prefixes through any of them.

    Raises:
      PromptError: the given salt is none.
    """
    if given is not None:
        check_cache_salt(given)
    # "\0" is in no salt, so no pair of key and salt looks like another.
    return hashlib.sha256(f"{key}\0{given or ''}".encode()).hexdigest()
