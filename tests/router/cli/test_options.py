"""What `warmroute check` says of plugins that are named in the file."""

from __future__ import annotations

from pathlib import Path

import pytest

from router.cli.options import read_config
from router.errors import ConfigError


def test_a_shadow_that_is_not_installed_is_said_with_its_line(tmp_path: Path) -> None:
    file = tmp_path / "warmroute.yaml"
    file.write_text("engines: [{url: 'http://127.0.0.1:8000'}]\npolicy:\n  shadow: [lmetric, lmetrik]\n")
    with pytest.raises(ConfigError) as caught:
        read_config(file, None)
    (mistake,) = caught.value.mistakes
    assert ":3: policy.shadow[1]: " in mistake
    assert "lmetrik" in mistake
