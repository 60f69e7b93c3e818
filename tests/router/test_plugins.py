"""Plugins by name: found, misspelt, or broken, and each said so."""

from __future__ import annotations

from pathlib import Path

import pytest

from router import plugins
from router.errors import ConfigError

GROUP = "warmroute_test.group"


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two packages with entry points, installed as pip would leave them."""
    _install(tmp_path, "wr-one", "good = wr_good:Thing\nbroken = wr_broken:Thing\nabsent = wr_absent.deep:Thing\n")
    _install(tmp_path, "wr-two", "lacking = wr_lacking:Thing\nnone = wr_good:Nothing\ntwice = wr_good:Thing\n")
    (tmp_path / "wr_good.py").write_text("class Thing:\n    class Inner: pass\n")
    (tmp_path / "wr_broken.py").write_text("raise ZeroDivisionError('halves of nothing')\n")
    (tmp_path / "wr_lacking.py").write_text("import wr_a_dependency\n")
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


def _install(site: Path, distribution: str, entries: str) -> None:
    info = site / f"{distribution.replace('-', '_')}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[{GROUP}]\n{entries}")


def _mistake(name: str) -> str:
    with pytest.raises(ConfigError) as caught:
        plugins.load(GROUP, name)
    (mistake,) = caught.value.mistakes
    return mistake


@pytest.mark.usefixtures("installed")
class TestInstalled:
    def test_names(self) -> None:
        assert plugins.names(GROUP) == ["absent", "broken", "good", "lacking", "none", "twice"]

    def test_by_name(self) -> None:
        assert plugins.load(GROUP, "good").__name__ == "Thing"

    def test_by_module_and_attribute(self) -> None:
        assert plugins.load(GROUP, "wr_good:Thing") is plugins.load(GROUP, "good")
        assert plugins.load(GROUP, "wr_good:Thing.Inner").__name__ == "Inner"

    def test_a_misspelt_name(self) -> None:
        mistake = _mistake("goood")
        assert "did you mean 'good'?" in mistake
        assert "absent, broken, good, lacking, none, twice" in mistake

    def test_a_module_that_is_not_there(self) -> None:
        assert _mistake("absent") == "'absent': there is no module 'wr_absent' (is its package installed?)"
        assert (
            _mistake("wr_nowhere:Thing")
            == "'wr_nowhere:Thing': there is no module 'wr_nowhere' (is its package installed?)"
        )

    def test_a_broken_module_keeps_its_own_error(self) -> None:
        with pytest.raises(ConfigError, match="ZeroDivisionError: halves of nothing") as caught:
            plugins.load(GROUP, "broken")
        assert isinstance(caught.value.__cause__, ZeroDivisionError)

    def test_a_module_whose_dependency_is_missing_is_broken_not_absent(self) -> None:
        assert "is there but module 'wr_lacking' cannot be imported: ModuleNotFoundError" in _mistake("lacking")

    def test_an_attribute_that_is_not_there(self) -> None:
        assert _mistake("none").startswith("'none': module 'wr_good' has no 'Nothing'")
        assert _mistake("wr_good:Thong") == "'wr_good:Thong': module 'wr_good' has no 'Thong' (did you mean 'Thing'?)"

    def test_one_name_from_two_packages(self, installed: Path) -> None:
        _install(installed, "wr-three", "twice = wr_good:Other\n")
        assert _mistake("twice") == (
            f"'twice' is installed twice in {GROUP}, by wr-three (wr_good:Other) and wr-two (wr_good:Thing): remove one"
        )


def test_nothing_installed() -> None:
    assert "none is installed" in _mistake("good")
