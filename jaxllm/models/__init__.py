"""Flax NNX model definitions, one decoder file per family, and their registry."""
