"""Secrets that are made once."""

from __future__ import annotations

import stat
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from router.state import kept_secret


def test_a_secret_is_made_once_and_for_its_owner(tmp_path: Path) -> None:
    made = kept_secret(tmp_path, "pepper")
    assert len(made) == 32
    assert kept_secret(tmp_path, "pepper") == made != kept_secret(tmp_path, "secret")
    assert stat.S_IMODE((tmp_path / "pepper").stat().st_mode) == 0o600
    assert sorted(file.name for file in tmp_path.iterdir()) == ["pepper", "secret"]


def test_all_that_start_at_once_get_the_same(tmp_path: Path) -> None:
    with ThreadPoolExecutor(8) as threads:
        assert len(set(threads.map(kept_secret, [tmp_path] * 8, ["pepper"] * 8))) == 1
