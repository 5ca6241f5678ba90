"""Where weights come from: folders, hub, GGUF, Orbax, random."""
