"""Errors that callers see: each names the field, the offending value and what is allowed."""

from collections.abc import Sequence


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


class BusyError(JaxLLMError, RuntimeError):
    """The weights or the pool cannot change while requests are unfinished."""

    def __init__(self, action: str, num_unfinished: int):
        self.num_unfinished = num_unfinished
        super().__init__(
            f"{action} with {num_unfinished} unfinished requests: let them end, or say what "
            "becomes of them with running='abort' or running='recompute'"
        )


class AsleepError(JaxLLMError, RuntimeError):
    """The engine has given its weights or its KV pool back."""


class WeightsError(JaxLLMError, ValueError):
    """Arrays that are not the weights of this model.

    Attributes:
      problems: one line per leaf, with its name, what it is and what is expected.
    """

    def __init__(self, problems: Sequence[str], limit: int = 10):
        self.problems = tuple(problems)
        more = len(self.problems) - limit
        shown = "; ".join(self.problems[:limit]) + (f"; and {more} more" if more > 0 else "")
        super().__init__(f"not the weights of this model: {shown}")


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
