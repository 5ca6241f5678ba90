"""The table of docs/sampling.md: every option has a row, and the tests that it names exist."""

import ast
import dataclasses
import re
from pathlib import Path

import pytest

from jaxllm import SamplingParams
from jaxllm.sampling_params import UNSUPPORTED_DEFAULTS

TESTS = Path(__file__).parent
PAGE = (TESTS.parent / "docs" / "sampling.md").read_text()
# Rows of the table: | names | default | rule | tests |
ROWS = [
    [cell.strip() for cell in line.strip().strip("|").split("|")]
    for line in PAGE.splitlines()
    if line.startswith("|") and ".py: " in line
]


def test_every_option_has_one_row_or_is_listed_as_not_supported():
    named = [name for row in ROWS for name in row[0].split(", ")]
    fields = {field.name for field in dataclasses.fields(SamplingParams)}
    assert sorted(named) == sorted(fields - set(UNSUPPORTED_DEFAULTS))
    unsupported = re.search(r"Not supported: ([a-z_,\s]+)\.", PAGE)
    assert unsupported is not None
    assert set(re.findall(r"\w+", unsupported[1])) == set(UNSUPPORTED_DEFAULTS)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0])
def test_the_tests_that_a_row_names_exist(row):
    references = re.findall(r"([\w/]+\.py): ((?:test_\w+(?:, )?)+)", row[-1])
    assert references, row
    for path, names in references:
        tree = ast.parse((TESTS / path).read_text())
        defined = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
        assert set(names.split(", ")) - {""} <= defined, (path, names)
