"""Tool calls and reasoning in a model's text, found character by character."""
