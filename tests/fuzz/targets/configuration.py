"""A configuration file: plain data, or mistakes with their lines; never an error of ours."""

from __future__ import annotations

from router.config.source import read

WORDS = (
    b"\n", b"  ", b"- ", b": ", b"a: ", b"b:\n", b"? ", b"[", b"]", b"{", b"}", b"&x ", b"*x", b"<<: *x\n",
    b"!!int ", b"!x ", b"${HOME}", b"${NO:-d}", b"${", b"$${", b"os.environ/HOME", b"true", b"~", b"0x1", b"1e9",
    b".5", b"'", b'"', b"|\n", b">\n", b"#", b"---\n", b"...\n", b"%YAML 1.1\n", b"\t", b"\xff", b"\xef\xbb\xbf",
    b"\\x", b"\0", b"- " * 30,
)  # fmt: skip


class _File:
    """What `read` needs of a path."""

    def __init__(self, data: bytes) -> None:
        self._data = data

    def __str__(self) -> str:
        return "w.yaml"

    def read_text(self, encoding: str) -> str:
        return self._data.decode(encoding)


def target(data: bytes) -> None:
    secret = "s3cr3t-value"
    source = read(_File(data), {"HOME": secret})  # type: ignore[arg-type]
    for mistake in source.mistakes:
        assert mistake.startswith("w.yaml")
        assert secret not in mistake
    assert isinstance(source.data, dict)
