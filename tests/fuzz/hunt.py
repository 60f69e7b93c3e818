"""One target under atheris, in a process of its own: `python -m tests.fuzz.hunt NAME RUNS FOLDER` (see `__main__`).

libFuzzer would end at the first finding. Here each kind of failure (its type, and the last line of ours that it came
through) is written down once, and the hunt goes on.
"""

from __future__ import annotations

import sys
import tempfile
import traceback
from pathlib import Path

import atheris

from tests.fuzz.targets import CORPUS, Target, load

_ROOT = Path(__file__).parents[2]
_LONGEST_WORD = 64  # libFuzzer's own bound
_LONGEST_INPUT = 4096


class Findings:
    """`FOLDER/NAME-TYPE-FILE-LINE`: the input; beside it, with .txt, how it failed."""

    def __init__(self, folder: Path, target: Target) -> None:
        self._folder = folder
        self._target = target
        self._seen: set[str] = set()

    def try_one(self, data: bytes) -> None:
        try:
            self._target.run(data)
        except Exception as error:
            self._keep(data, error)

    def _keep(self, data: bytes, error: Exception) -> None:
        frames = traceback.extract_tb(error.__traceback__)
        ours = [frame for frame in frames if Path(frame.filename).is_relative_to(_ROOT / "router")]
        ours += [frame for frame in frames if Path(frame.filename).is_relative_to(_ROOT / "adapters")]
        place = (ours or frames)[-1]
        where = frames[-1] if isinstance(error, AssertionError) else place
        kind = f"{self._target.name}-{type(error).__name__}-{Path(where.filename).stem}-{where.lineno}"
        if kind in self._seen:
            return
        self._seen.add(kind)
        self._folder.mkdir(parents=True, exist_ok=True)
        (self._folder / kind).write_bytes(data)
        (self._folder / f"{kind}.txt").write_text("".join(traceback.format_exception(error)), "utf-8", "replace")


def _entry(word: bytes) -> str:
    escaped = "".join(f"\\x{byte:02x}" for byte in word)
    return f'"{escaped}"\n'


def main(name: str, runs: str, folder: str) -> None:
    with atheris.instrument_imports(include=["router", "adapters"]):
        target = load(name)
    grown = Path(folder) / "corpus" / name
    grown.mkdir(parents=True, exist_ok=True)
    words = [word for word in target.words if len(word) <= _LONGEST_WORD]
    with tempfile.NamedTemporaryFile("w", suffix=".dict") as dictionary:
        dictionary.writelines(_entry(word) for word in words)
        dictionary.flush()
        options = [
            f"-runs={runs}",
            f"-dict={dictionary.name}",
            f"-max_len={_LONGEST_INPUT}",
            f"-artifact_prefix={folder}/findings/{name}-",
            "-timeout=20",
            "-print_final_stats=1",
            "-verbosity=0",
        ]
        findings = Findings(Path(folder) / "findings", target)
        atheris.Setup([name, *options, str(grown), str(CORPUS / name)], findings.try_one)
        atheris.Fuzz()


if __name__ == "__main__":
    main(*sys.argv[1:])
