"""Publishing a build: files of others are not removed, and nothing is built that cannot be published."""

import logging
import os
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from tests.support.machine import mounted, need_root
from tests.support.prepared import build, control

import rankfeed as rf
from rankfeed.errors import PrepareError
from rankfeed.prepare.marker import MARKER_NAME, changed_files


def kept(path: Path) -> list[Path]:
    """Where files were kept that others put into a folder while it was replaced."""
    return list(path.parent.glob(f".{path.name}.kept-*"))


def test_foreign_files_added_while_a_directory_is_replaced_are_kept_and_logged(
    path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    rf.prepare_once(path, build, key="1")
    real = os.rename

    def just_before(source: Any, target: Any) -> None:
        if source == path and "old-" in str(target):
            (path / "sub" / "thesis.txt").write_text("years of work")
        real(source, target)

    monkeypatch.setattr(os, "rename", just_before)
    with caplog.at_level(logging.WARNING, "rankfeed"):
        rf.prepare_once(path, build, key="2")
    (folder,) = kept(path)
    assert (folder / "sub" / "thesis.txt").read_text() == "years of work"
    assert str(folder) in caplog.text
    assert "sub/thesis.txt" in caplog.text
    assert changed_files(path) == []
    assert sorted(os.listdir(path)) == [MARKER_NAME, "a.txt", "sub"]


@pytest.mark.parametrize("strange", [True, False])
def test_foreign_files_in_a_directory_that_a_killed_builder_moved_are_kept(path: Path, strange: bool) -> None:
    rf.prepare_once(path, build, key="1")
    killed = (
        "import os, pathlib, signal, sys\n"
        "from rankfeed.prepare import prepare_once\n"
        "path, write, real = pathlib.Path(sys.argv[1]), sys.argv[2] == 'True', os.rename\n"
        "def rename(source, target):\n"
        "    if target == path: os.kill(os.getpid(), signal.SIGKILL)\n"
        "    if write and source == path and 'old-' in str(target):\n"
        "        (path / 'thesis.txt').write_text('years of work')\n"
        "    real(source, target)\n"
        "os.rename = rename\n"
        "prepare_once(path, lambda staging: (staging / 'a').write_text('a'), key='2')\n"
    )
    done = subprocess.run([sys.executable, "-c", killed, str(path), str(strange)], check=False, timeout=600)
    assert done.returncode == -signal.SIGKILL
    rf.prepare_once(path, build, key="2")
    assert [(folder / "thesis.txt").read_text() for folder in kept(path)] == ["years of work"] * strange
    assert sorted(os.listdir(path)) == [MARKER_NAME, "a.txt", "sub"]


def test_foreign_files_in_the_lease_directory_are_not_removed(path: Path) -> None:
    theirs = [control(path) / name for name in ("old-photos", "old-20240101", "build-tools", "garbage-in")]
    for folder in theirs:
        folder.mkdir(parents=True)
        (folder / "x").write_text("x")
    (control(path) / "mine.failed").write_text("not a failure of ours")
    rf.prepare_once(path, build, key="1")
    rf.prepare_once(path, build, key="2")
    assert [(folder / "x").read_text() for folder in theirs] == ["x"] * 4
    assert (control(path) / "mine.failed").read_text() == "not a failure of ours"
    shutil.rmtree(control(path))


@contextmanager
def anybody() -> Iterator[Path]:
    """A folder where other users may look and write: not below pytest's own."""
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o777)
        yield Path(folder)


@contextmanager
def unprivileged() -> Iterator[None]:
    """Without root's rights, should this process have them."""
    if os.geteuid():
        yield
        return
    os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(0)


def test_a_directory_with_an_unreadable_subdirectory_is_not_replaced() -> None:
    with anybody() as top:
        path = top / "data"
        with unprivileged():
            rf.prepare_once(path, build, key="1")
            (path / "mine").mkdir()
            (path / "mine" / "thesis.txt").write_text("years of work")
            (path / "mine").chmod(0)
            with pytest.raises(PrepareError, match=r"cannot read[\s\S]*Permission denied[\s\S]*mine"):
                rf.prepare_once(path, build, key="2")
            (path / "mine").chmod(0o700)
        assert (path / "mine" / "thesis.txt").read_text() == "years of work"
        shutil.rmtree(top / ".data.prepare", ignore_errors=True)


def test_a_read_error_in_a_prepared_directory_raises_and_does_not_build(path: Path) -> None:
    rf.prepare_once(path, build)
    built: list[Path] = []
    real = os.lstat

    def broken(file: Any, **options: Any) -> os.stat_result:
        if str(file).endswith("b.txt"):
            raise OSError(5, "Input/output error")
        return real(file, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "lstat", broken)
        with pytest.raises(PrepareError, match=r"cannot read[\s\S]*Input/output error"):
            rf.prepare_once(path, built.append)
    assert not built
    assert changed_files(path) == []


def test_an_unreadable_directory_of_another_user_raises_and_is_not_built() -> None:
    need_root("being two users")
    builders: list[int] = []

    def private(staging: Path) -> None:
        builders.append(os.geteuid())
        build(staging)
        (staging / "sub").chmod(0o700)

    with anybody() as top:
        rf.prepare_once(top / "data", private)
        with unprivileged(), pytest.raises(PrepareError, match=r"cannot read[\s\S]*Permission denied[\s\S]*sub"):
            rf.prepare_once(top / "data", private)
        assert builders == [0]
        assert os.listdir(top) == ["data"]


def cannot_be_replaced(path: Path, said: str) -> None:
    built: list[Path] = []
    with pytest.raises(PrepareError, match=rf"cannot replace[\s\S]*{said}[\s\S]*inside it"):
        rf.prepare_once(path, built.append, key="2")
    assert not built
    assert not control(path).exists()


@pytest.mark.parametrize("filled", [True, False])
def test_a_mount_point_that_cannot_be_replaced_raises_before_the_build(path: Path, filled: bool) -> None:
    path.mkdir(parents=True)
    with mounted("tmpfs", path, "size=1m"):
        if filled:
            rf.prepare_once(path.parent / "other", build)
            shutil.copytree(path.parent / "other", path, dirs_exist_ok=True)
        cannot_be_replaced(path, "a file system is mounted there")
        if filled:
            rf.prepare_once(path, build)  # it is there already
        rf.prepare_once(path / "inside", build)
        shutil.rmtree(path / "inside")


def test_a_directory_of_an_overlay_image_raises_before_the_build(tmp_path: Path) -> None:
    image, upper, top = (tmp_path / name for name in ("image", "upper", "top"))
    for folder in (image, upper, top):
        folder.mkdir()
    with mounted(
        "tmpfs", upper, "size=8m"
    ):  # the tests' own disk may be an overlay, on which there can be no other
        (upper / "changes").mkdir()
        (upper / "work").mkdir()
        rf.prepare_once(image / "data", build, key="1")
        options = f"lowerdir={image},upperdir={upper / 'changes'},workdir={upper / 'work'},redirect_dir=off"
        with mounted("overlay", top, options):
            cannot_be_replaced(top / "data", "Invalid cross-device link")
            rf.prepare_once(top / "data", build, key="1")


@pytest.mark.parametrize("anothers", [True, False])
def test_a_directory_without_write_permission_raises_before_the_build(anothers: bool) -> None:
    with anybody() as top:
        path = top / "data"
        if anothers:
            need_root("being two users")
            rf.prepare_once(path, build, key="1")
        with unprivileged():
            if not anothers:
                rf.prepare_once(path, build, key="1")
                path.chmod(0o555)
            cannot_be_replaced(path, "Permission denied")


@pytest.mark.parametrize("mode", [0o777, 0o1777, 0o2775])
def test_another_user_who_may_write_beside_the_directory_may_build_after_a_failure(mode: int) -> None:
    need_root("being two users")

    def fails(staging: Path) -> None:
        raise ValueError("full")

    with anybody() as top:
        path = top / "data"
        os.chown(top, 0, 65534)
        os.chmod(top, mode)
        with pytest.raises(PrepareError, match="full"):
            rf.prepare_once(path, fails)
        assert stat.S_IMODE(control(path).stat().st_mode) == mode
        os.setegid(65534)
        try:
            with unprivileged():
                rf.prepare_once(path, build)
        finally:
            os.setegid(0)
        assert changed_files(path) == []
        shutil.rmtree(control(path), ignore_errors=True)


def test_a_user_who_may_not_take_over_is_referred_to_the_owner() -> None:
    need_root("being two users")
    with anybody() as top:
        control(top / "data").mkdir(mode=0o755)
        (control(top / "data") / "0123456789abcdef.lock").touch()
        with unprivileged(), pytest.raises(PrepareError, match=r"Permission denied[\s\S]*ask root, the owner of"):
            rf.prepare_once(top / "data", build)


def test_a_build_succeeds_if_no_failure_record_can_be_removed(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: Any) -> None:
        raise PermissionError("others' failures")

    monkeypatch.setattr("rankfeed.prepare.build.forget_failures", refused)
    assert rf.prepare_once(path, build) == path
