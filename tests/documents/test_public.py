"""The names that `import pipar` provides."""

from __future__ import annotations

import pytest

import pipar


@pytest.mark.parametrize("name", pipar.__all__)
def test_a_public_name_exists_and_has_a_docstring(name: str) -> None:
    assert (getattr(pipar, name).__doc__ or "").strip()


def test_the_public_names_are_sorted_and_unique() -> None:
    constants = {name for name in pipar.__all__ if name.isupper()}
    assert pipar.__all__ == [*sorted(constants), *sorted(set(pipar.__all__) - constants)]
