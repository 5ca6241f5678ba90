"""Errors that callers see: each names the field, the offending value and what is allowed."""


class JaxLLMError(Exception):
    """Base of every error this package raises on purpose."""


class ParameterError(JaxLLMError, ValueError):
    """A request parameter is outside its range or not supported."""

    def __init__(self, field: str, value: object, rule: str):
        self.field = field
        self.value = value
        self.rule = rule
        super().__init__(f"{field}={value!r}: {rule}")


class ConfigError(JaxLLMError, ValueError):
    """An engine setting cannot work with this model or machine."""


class CapacityError(JaxLLMError, ValueError):
    """A request can never fit the KV pool, whatever else is running."""

    def __init__(self, request_id: str, needed: int, available: int, block_size: int):
        self.request_id = request_id
        self.needed = needed
        self.available = available
        super().__init__(
            f"request {request_id} needs {needed} KV blocks of {block_size} tokens at its full "
            f"length, but the pool holds {available}; lower max_tokens, shorten the prompt, or "
            "give the engine more KV memory"
        )
