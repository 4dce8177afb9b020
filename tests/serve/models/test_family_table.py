"""docs/models.md lists the families of the code."""

from __future__ import annotations

from serve.models.families import FAMILIES
from tests.support.engine.family_table import BEGIN, PAGE, page_with, table


def test_the_page_has_the_families_of_the_code() -> None:
    """`python -m tests.support.engine.family_table` writes it anew."""
    text = PAGE.read_text()
    assert BEGIN in text
    assert text == page_with(text, table())


def test_every_family_says_which_models_it_is() -> None:
    assert [name for name, family in FAMILIES.items() if not family.title] == []
