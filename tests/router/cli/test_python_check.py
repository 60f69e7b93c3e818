"""Doctor tells a Python that was built without optimizations."""

from __future__ import annotations

import pytest

from router.cli.python_check import check_python


@pytest.mark.parametrize(
    ("settings", "prefix", "state"),
    [
        ({"CONFIG_ARGS": "'--prefix=/opt/python' '--enable-shared'"}, "/home/me/.pyenv/versions/3.11.7", "warn"),
        ({"CONFIG_ARGS": "'--enable-optimizations' '--with-lto'"}, "/usr/local", "ok"),  # official images
        ({"CONFIG_ARGS": "'--with-lto'", "PY_CORE_CFLAGS": "-O3 -fprofile-use"}, "/opt/python", "ok"),
        ({"CONFIG_ARGS": "'--enable-shared' '--prefix=/usr'"}, "/usr", "ok"),  # Debian 12 tells no more
        ({}, "/opt/python", "warn"),
    ],
)
def test_how_it_was_built(settings: dict[str, str], prefix: str, state: str) -> None:
    finding = check_python(settings, prefix=prefix)
    assert finding.state == state
    assert ("--enable-optimizations" in finding.mend) is (state == "warn")


def test_of_the_one_that_runs() -> None:
    assert check_python().state in ("ok", "warn")
