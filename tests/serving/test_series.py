"""The page of the series is what prometheus_client reads and would have written."""

import prometheus_client
import pytest
from prometheus_client.parser import text_string_to_metric_families

from serving.series import Counter, Gauge, Histogram, Registry

NASTY = 'a"b\\c\nd,e=f{}'
BOUNDS = (0.1, 1, 2.5)
VALUES = (0.05, 0.1, 0.11, 2.5, 7.0)


def parsed(page):
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(page)
        for sample in family.samples
        if not sample.name.endswith("_created")
    }


def test_equals_the_page_of_the_official_library():
    ours, theirs = Registry(), prometheus_client.CollectorRegistry()
    labels = {"model": NASTY, "engine": "0"}
    names = list(labels)
    Gauge(ours, "g", "A gauge.", names).labels(**labels).set(3)
    prometheus_client.Gauge("g", "A gauge.", names, registry=theirs).labels(**labels).set(3)
    Counter(ours, "c", "A counter.", names).labels(NASTY, "0").inc(2.5)
    prometheus_client.Counter("c", "A counter.", names, registry=theirs).labels(NASTY, "0").inc(2.5)
    mine = Histogram(ours, "h", "A histogram.", names, BOUNDS).labels(**labels)
    other = prometheus_client.Histogram(
        "h", "A histogram.", names, buckets=BOUNDS, registry=theirs
    ).labels(**labels)
    for value in VALUES:
        mine.observe(value)
        other.observe(value)
    page = ours.render().decode()
    assert parsed(page) == parsed(prometheus_client.generate_latest(theirs).decode())
    kinds = [family.type for family in text_string_to_metric_families(page)]
    assert kinds == ["gauge", "counter", "histogram"]


def test_several_equal_values_at_once():
    one, many = Registry(), Registry()
    first = Histogram(one, "h", "A histogram.", ["x"], BOUNDS).labels("1")
    second = Histogram(many, "h", "A histogram.", ["x"], BOUNDS).labels("1")
    for _ in range(4):
        first.observe(0.5)
    second.observe(0.5, 4)
    assert one.render() == many.render()


def test_a_series_keeps_its_value_and_wrong_labels_are_refused():
    counter = Counter(Registry(), "c", "A counter.", ["x", "y"])
    counter.labels("1", "2").inc()
    counter.labels(y="2", x="1").inc()
    assert counter.samples() == {'c_total{x="1",y="2"}': 2.0}
    for values, named in ((("1",), {}), ((), {"x": "1"}), (("1",), {"y": "2"})):
        with pytest.raises(ValueError, match="labels"):
            counter.labels(*values, **named)


def test_a_name_is_taken_once():
    registry = Registry()
    Gauge(registry, "g", "A gauge.", ["x"])
    with pytest.raises(ValueError, match="already"):
        Gauge(registry, "g", "Another.", ["x"])
