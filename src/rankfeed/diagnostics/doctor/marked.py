"""Processes of an examination have a mark in their environment, by which they are found and ended for certain."""

import time
from contextlib import suppress
from pathlib import Path

#: The variable.
MARK = "RANKFEED_EXAMINATION"


def end_all(mark: str, spared: int, *, trackers: bool = False) -> None:
    """Kill whatever has the mark.

    Python's resource trackers end by themselves, and remove what killed processes have left; they are given the
    time to.

    Args:
        mark: of an examination.
        spared: number of a process that goes on.
        trackers: whether those are ended that do not end by themselves.
    """
    import psutil

    for patience in (0.0, 0.05, 0.2, 1.0):
        time.sleep(patience)
        left = [one for one in psutil.process_iter() if one.pid != spared and _has(one, mark)]
        doomed = [one for one in left if not _is_tracker(one) or (trackers and patience >= 1)]
        for one in doomed:
            with suppress(psutil.Error):
                one.kill()
        if not (left if trackers else doomed):
            return


def _has(process: object, mark: str) -> bool:
    with suppress(OSError):
        environ = Path(f"/proc/{process.pid}/environ").read_bytes()  # type: ignore[attr-defined]
        return f"{MARK}={mark}".encode() in environ
    return False


def _is_tracker(process: object) -> bool:
    with suppress(OSError):
        command = Path(f"/proc/{process.pid}/cmdline").read_bytes()  # type: ignore[attr-defined]
        return b"resource_tracker" in command
    return False
