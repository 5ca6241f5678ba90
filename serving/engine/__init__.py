"""The engine in a process of its own, and the API process's end of it."""
