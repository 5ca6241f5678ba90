"""Processes that face users: an OpenAI-compatible HTTP server and an engine process behind it."""
