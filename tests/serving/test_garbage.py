"""What start-up made is left alone by the collector, what comes later is not."""

import subprocess
import sys

# In a process of its own, since what is frozen stays so.
SCRIPT = """
import gc, weakref
from serving.garbage import keep_from_collector

class Node:
    pass

def ring():
    node = Node()
    node.itself = node
    return weakref.ref(node)

gc.disable()
before = ring()
kept = [Node() for _ in range(1000)]
keep_from_collector()
assert before() is None, "garbage was kept"
assert gc.get_freeze_count() > 1000
assert not any(isinstance(each, Node) for each in gc.get_objects())
after = ring()
gc.collect()
assert after() is None, "later garbage was kept"
"""


def test_only_later_objects_are_collected() -> None:
    subprocess.run([sys.executable, "-c", SCRIPT], check=True, timeout=60)
