"""A function together with the shapes it is compiled for."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax


@dataclasses.dataclass(frozen=True, slots=True)
class Program:
    """What there is to know of a program before it is compiled.

    Attributes:
      arguments: trees of ShapeDtypeStructs with shardings, one per positional argument.
      out_shardings: shardings of the result, or a tree of them that is a prefix of the result's.
      donated: positions of the arguments whose memory the results may take.
    """

    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    out_shardings: Any
    donated: tuple[int, ...] = ()

    def lower(self) -> jax.stages.Lowered:
        """Traces and lowers."""
        jitted = jax.jit(
            self.function, donate_argnums=self.donated, out_shardings=self.out_shardings
        )
        return jitted.lower(*self.arguments)
