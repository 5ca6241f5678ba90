"""Python's garbage collector and what a process holds all its life."""

import gc


def keep_from_collector() -> None:
    """Takes all objects there are out of later collections.

    Hundreds of thousands come with the libraries at start and stay; a full collection that walks
    them again stops every stream meanwhile.
    """
    gc.collect()
    gc.freeze()
