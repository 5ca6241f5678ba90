"""Ragged paged attention: one contract, several implementations, one oracle."""
