"""Errors of the text side: each a `ValueError` that names the value and what is allowed."""


class TextError(ValueError):
    """Base of every error this package raises on purpose."""


class TokenizerError(TextError):
    """A tokenizer that cannot be loaded, or one of a kind that is not supported."""


class PromptError(TextError):
    """A prompt that no model can be asked: empty, too long, ids out of range, wrong type."""


class UnencodableTextError(PromptError):
    """Text that has no UTF-8 form because it holds a lone surrogate."""


class ChatMessageError(PromptError):
    """A conversation of the wrong shape, or beyond the limits."""


class ChatTemplateError(TextError):
    """A chat template that is missing, does not parse, refuses the messages or runs too long."""
