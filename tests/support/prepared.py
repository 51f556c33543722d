"""A small build, and where its leases lie."""

from pathlib import Path


def build(staging: Path) -> None:
    (staging / "sub").mkdir()
    (staging / "a.txt").write_text("a")
    (staging / "sub" / "b.txt").write_text("bb")


def control(path: Path) -> Path:
    return path.with_name(f".{path.name}.prepare")
