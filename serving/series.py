"""Series for Prometheus, and the page that tells them in its text format (0.0.4).

The event loop counts every token here and renders the page between steps, so both are made cheap:
no locks, since one thread uses them, and labels that are written out once.
"""

from bisect import bisect_left
from collections.abc import Sequence
from typing import Any

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_ESCAPES = str.maketrans({"\\": r"\\", "\n": r"\n", '"': r"\""})


class Value:
    """A number: a counter's or a gauge's."""

    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value = 0.0

    def inc(self, amount: float = 1.0) -> None:
        self.value += amount

    def set(self, value: float) -> None:
        self.value = float(value)


class Distribution:
    """Observations, counted by bucket.

    Attributes:
      counts: observations above the bound before and not above this one; the last is above all.
    """

    __slots__ = ("_bounds", "counts", "sum")

    def __init__(self, bounds: Sequence[float]):
        self._bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float, count: int = 1) -> None:
        """Takes the same value `count` times."""
        self.counts[bisect_left(self._bounds, value)] += count
        self.sum += value * count


class _Family[T]:
    """The series of one name.

    Args:
      name: without the suffix that its kind adds.
      label_names: in the order of `labels`.
    """

    kind = ""

    def __init__(self, registry: "Registry", name: str, help: str, label_names: Sequence[str]):
        self.name = name
        self.label_names = tuple(label_names)
        self.head = f"# HELP {self.page_name} {help}\n# TYPE {self.page_name} {self.kind}\n"
        self._children: dict[tuple[str, ...], T] = {}
        self._lines: list[tuple[list[str], T]] = []
        registry.add(self)

    @property
    def page_name(self) -> str:
        """As the page's head has it."""
        return self.name

    def labels(self, *values: str, **named: str) -> T:
        """The series with these labels.

        Raises:
          ValueError: not the labels of this family.
        """
        if named:
            if values or named.keys() != set(self.label_names):
                raise ValueError(f"{self.name} has the labels {self.label_names}")
            values = tuple(named[name] for name in self.label_names)
        child = self._children.get(values)
        if child is None:
            if len(values) != len(self.label_names):
                raise ValueError(f"{self.name} has the labels {self.label_names}")
            child = self._children[values] = self._new()
            pairs = zip(self.label_names, values, strict=True)
            written = ",".join(f'{name}="{value.translate(_ESCAPES)}"' for name, value in pairs)
            self._lines.append((self._names(written), child))
        return child

    def samples(self) -> dict[str, float]:
        """Value by series, as the page has them."""
        found: dict[str, float] = {}
        for names, child in self._lines:
            found |= zip(names, self._values(child), strict=True)
        return found

    def render(self) -> str:
        """Its part of the page."""
        parts = [self.head]
        for names, child in self._lines:
            for name, value in zip(names, self._values(child), strict=True):
                parts.append(f"{name} {value!r}\n")
        return "".join(parts)

    def _new(self) -> T:
        raise TypeError(f"{type(self).__name__} is no kind of series")

    def _names(self, labels: str) -> list[str]:
        """The series of a child, whose labels are written so."""
        return [f"{self.page_name}{{{labels}}}"]

    def _values(self, child: Any) -> list[float]:
        return [child.value]


class Gauge(_Family[Value]):
    kind = "gauge"

    def _new(self) -> Value:
        return Value()


class Counter(_Family[Value]):
    """Its series end in `_total`."""

    kind = "counter"

    @property
    def page_name(self) -> str:
        return f"{self.name}_total"

    def _new(self) -> Value:
        return Value()


class Histogram(_Family[Distribution]):
    """Counts of observations up to each bound, their number and their sum."""

    kind = "histogram"

    def __init__(
        self,
        registry: "Registry",
        name: str,
        help: str,
        label_names: Sequence[str],
        bounds: Sequence[float],
    ):
        self._bounds = tuple(float(bound) for bound in bounds)
        super().__init__(registry, name, help, label_names)

    def _new(self) -> Distribution:
        return Distribution(self._bounds)

    def _names(self, labels: str) -> list[str]:
        bounds = [*map(repr, self._bounds), "+Inf"]
        before = f"{labels}," if labels else ""
        buckets = [f'{self.name}_bucket{{{before}le="{bound}"}}' for bound in bounds]
        return [*buckets, f"{self.name}_count{{{labels}}}", f"{self.name}_sum{{{labels}}}"]

    def _values(self, child: Distribution) -> list[float]:
        values = []
        total = 0
        for count in child.counts:
            total += count
            values.append(float(total))
        return [*values, float(total), child.sum]


class Registry:
    """The families of one server.

    Attributes:
      families: by name, in the order of the page.
    """

    def __init__(self) -> None:
        self.families: dict[str, _Family[Any]] = {}

    def add(self, family: _Family[Any]) -> None:
        """ValueError if there is one of its name."""
        if family.name in self.families:
            raise ValueError(f"{family.name} is there already")
        self.families[family.name] = family

    def render(self) -> bytes:
        """The page."""
        return "".join(family.render() for family in self.families.values()).encode()
