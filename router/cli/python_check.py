"""What `warmroute doctor` says of the Python it runs on."""

from __future__ import annotations

import sys
import sysconfig
from collections.abc import Mapping
from typing import Any

from router.cli.checkup import Finding

_CHECK = "python"
_OF_THE_SYSTEM = "/usr"
"""Distributions optimize theirs, and not all of them say so in its settings (Debian tells those of another build)."""
_MEND = (
    "serve on your distribution's Python, on an official image or on one that uv installs, "
    'or build it with PYTHON_CONFIGURE_OPTS="--enable-optimizations --with-lto" (pyenv)'
)


def check_python(settings: Mapping[str, Any] | None = None, *, prefix: str = sys.base_prefix) -> Finding:
    """CPython built without profile-guided optimization, as pyenv does unless told otherwise, runs at half the speed.

    `settings`: of `sysconfig`; None: those of this interpreter.
    """
    built = sysconfig.get_config_vars() if settings is None else settings
    version = sys.version.split()[0]
    if prefix == _OF_THE_SYSTEM or _is_optimized(built):
        return Finding(_CHECK, "*", "ok", f"{version}, built for speed")
    return Finding(_CHECK, "*", "warn", f"{version}, built without optimizations: a request takes more CPU", _MEND)


def _is_optimized(built: Mapping[str, Any]) -> bool:
    if "--enable-optimizations" in str(built.get("CONFIG_ARGS")):
        return True
    used = (str(built.get(name)) for name in ("PY_CORE_CFLAGS", "PY_CFLAGS_NODIST", "CONFIGURE_CFLAGS_NODIST"))
    return sys.platform == "win32" or any("-fprofile-use" in flags for flags in used)  # python.org's is
