"""`warmroute tenants`, `projects`, `keys`, `audit`: over the database of the configuration."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from router.cli import main
from router.store.keys import key_mac


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "warmroute.yaml").write_text(f"state_dir: {tmp_path}/state\nengines: [{{url: 'http://127.0.0.1:9'}}]\n")
    return tmp_path


def _run(folder: Path, *words: str) -> int:
    try:
        main([*words, "-c", str(folder / "warmroute.yaml")])
    except SystemExit as ended:
        return int(ended.code or 0)
    return 0


def _made(folder: Path, *words: str) -> dict[str, Any]:
    assert _run(folder, *words, "--json", str(folder / "made.json")) == 0
    made: list[dict[str, Any]] = json.loads((folder / "made.json").read_bytes())
    return made[0]


def test_from_nothing_to_a_key_that_is_revoked(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tenant = _made(folder, "tenants", "create", "acme", "--isolation", "group:eu")
    project = _made(folder, "projects", "create", "search", "--tenant", "acme")
    assert (tenant["isolation"], project["tenant"]) == ("group:eu", tenant["id"])
    capsys.readouterr()
    key = _made(folder, "keys", "create", "prod", "--project", "search", "--model", "m", "--days", "1")
    shown = capsys.readouterr().out
    assert key["key"] in shown
    assert (key["tenant"], key["project"], key["models"]) == (tenant["id"], project["id"], ["m"])
    new = _made(folder, "keys", "rotate", key["id"], "--grace-s", "60")
    assert new["key"] != key["key"]
    assert _run(folder, "keys", "revoke", new["id"]) == 0
    assert _run(folder, "keys", "list", "--tenant", "acme", "--json", "-") == 0
    out = capsys.readouterr().out
    assert f"revoked {new['id']}" in out
    listed = json.loads(out[out.index("[\n") :])
    assert {row["id"]: row["replaced_by"] for row in listed} == {key["id"]: new["id"], new["id"]: None}
    assert key["key"] not in out
    assert _run(folder, "tenants", "archive", "acme") == 0
    assert _run(folder, "keys", "create", "late", "--project", project["id"]) == 1


def test_keys_are_hashed_with_the_pepper_of_the_gateway(folder: Path) -> None:
    made = _made(folder, "keys", "create", "boss", "--admin-scope", "*")
    pepper = (folder / "state" / "pepper").read_bytes()
    database = (folder / "state" / "warmroute.sqlite").read_bytes()
    wal = folder / "state" / "warmroute.db-wal"
    held = database + (wal.read_bytes() if wal.exists() else b"")
    assert key_mac(pepper, made["key"]) in held
    assert made["key"].encode() not in held


def test_the_audit_log_is_checked_against_a_head_that_was_kept(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _made(folder, "tenants", "create", "acme")
    capsys.readouterr()
    _run(folder, "audit", "head")
    head = capsys.readouterr().out
    (folder / "head.json").write_text(head)
    assert _run(folder, "audit", "verify", "--head", str(folder / "head.json")) == 0
    assert "whole: 1 rows" in capsys.readouterr().out
    (folder / "head.json").write_text(json.dumps(json.loads(head) | {"number": 2}))
    assert _run(folder, "audit", "verify", "--head", str(folder / "head.json")) == 1
    assert "broken after row 1" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("projects", "create", "p", "--tenant", "nobody"), "There is none of tenants named 'nobody'."),
        (("keys", "create", "k"), "An inference key has a project"),
        (("keys", "revoke", "key_x"), "There is no key 'key_x'."),
        (("tenants", "create", "t", "--isolation", "mine"), "isolation"),
    ],
)
def test_what_cannot_be_done_is_said_in_a_line(
    folder: Path, words: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert _run(folder, *words) == 1
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1
