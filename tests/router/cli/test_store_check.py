from __future__ import annotations

from pathlib import Path

from router.cli.store_check import check_store
from router.config import Config, load
from router.store.migrate import head


def _config(folder: Path, url: str | None) -> Config:
    file = folder / "warmroute.yaml"
    store = "" if url is None else f"store: {{url: '{url}'}}\n"
    file.write_text(f"engines: [{{url: 'http://127.0.0.1:1'}}]\n{store}")
    return load(file, environ={})


async def test_it_says_whether_the_database_is_as_it_has_to_be(tmp_path: Path, sqlite_url: str) -> None:
    (found,) = await check_store(_config(tmp_path, sqlite_url))
    assert (found.state, found.seen) == ("ok", f"it is at revision {head()}, as it has to be")
    (behind,) = await check_store(_config(tmp_path, f"sqlite:///{tmp_path}/bare.sqlite"))
    assert (behind.state, behind.seen) == ("fail", "the database has no tables yet")
    assert behind.mend == "run `warmroute db upgrade -c FILE`"
    (away,) = await check_store(_config(tmp_path, "postgresql://nobody:secret@127.0.0.1:1/none"))
    assert (away.state, away.seen) == ("fail", "it cannot be reached")
    assert await check_store(_config(tmp_path, None)) == []
