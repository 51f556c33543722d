"""Rendezvous of the processes of a job through small files in a directory that all of them see.

Each member posts a registration under a random token; a coordinator posts a reply that lists the tokens it has
read, and a member follows only coordinators whose reply lists its own. So files that an earlier job left are never
taken for those of this one, and no network, clock or process group is needed.
"""

from __future__ import annotations

import secrets
from contextlib import suppress
from pathlib import Path
from typing import Generic, TypeVar

import msgspec

from rankfeed.errors import RankfeedError
from rankfeed.storage.commit import make_directory, write_atomic
from rankfeed.storage.decodable import decodable
from rankfeed.storage.network_fs import refresh_path

_MEMBERS, _COORDINATORS = "members", "coordinators"
_Message = TypeVar("_Message", bound=msgspec.Struct)
_Reply = TypeVar("_Reply", bound=msgspec.Struct)


@decodable
class _ReplyFile(msgspec.Struct, frozen=True):
    message: msgspec.Raw
    heard: list[str]


class _Party:
    """A process that takes part.

    Args:
        directory: that all processes of the job see; created here, and removed by the last one that leaves.
        place: name of the subdirectory for its own file.
    """

    def __init__(self, directory: Path, place: str) -> None:
        self.directory = directory
        self.token = secrets.token_hex(8)
        self._path = directory / place / f"{self.token}.json"

    def _post(self, content: msgspec.Struct) -> None:
        for _ in range(8):  # the last process of an earlier run may just be removing the directory
            with suppress(FileNotFoundError, FileExistsError):
                make_directory(self._path.parent)
                write_atomic(self._path, msgspec.json.encode(content))
                return
        make_directory(self._path.parent)
        write_atomic(self._path, msgspec.json.encode(content))

    def _read(self, place: str, kind: type[_Message]) -> dict[str, _Message]:
        found = {}
        refresh_path(self.directory / place / "refresh")
        for path in (self.directory / place).glob("*.json"):
            # Removed meanwhile, or left by another version.
            with suppress(OSError, msgspec.DecodeError, RankfeedError):
                found[path.stem] = msgspec.json.decode(path.read_bytes(), type=kind)
        return found

    def leave(self) -> None:
        """Remove the file, and the directories if nothing else is in them."""
        with suppress(OSError):
            self._path.unlink()
        for place in (self.directory / _MEMBERS, self.directory / _COORDINATORS, self.directory):
            with suppress(OSError):
                place.rmdir()


class Member(_Party, Generic[_Reply]):
    """A process that registers and reads the replies to it.

    Args:
        directory: of the rendezvous.
        message: about this process.
        reply_kind: type of the coordinator's messages.

    Raises:
        OSError: the directory cannot be written.
    """

    def __init__(self, directory: Path, message: msgspec.Struct, reply_kind: type[_Reply]) -> None:
        super().__init__(directory, _MEMBERS)
        self._message, self._kind = message, reply_kind
        self._post(message)

    def replies(self) -> dict[str, _Reply]:
        """Messages of the coordinators that have heard this member, by their tokens."""
        if not self._path.exists():  # removed with what an earlier run left
            self._post(self._message)
        files = self._read(_COORDINATORS, _ReplyFile)
        heard = {token: file.message for token, file in files.items() if self.token in file.heard}
        return {token: msgspec.json.decode(message, type=self._kind) for token, message in heard.items()}


class Coordinator(_Party, Generic[_Message]):
    """A process that reads the registrations and posts one reply for all members.

    Args:
        directory: of the rendezvous.
        member_kind: type of the members' messages.
    """

    def __init__(self, directory: Path, member_kind: type[_Message]) -> None:
        super().__init__(directory, _COORDINATORS)
        self._kind = member_kind

    def members(self) -> dict[str, _Message]:
        """Messages of all registered processes by their tokens, those of other jobs included."""
        return self._read(_MEMBERS, self._kind)

    def reply(self, message: msgspec.Struct, heard: list[str]) -> None:
        """Post the reply.

        Args:
            message: for the members.
            heard: tokens of the members that it is for.
        """
        self._post(_ReplyFile(msgspec.Raw(msgspec.json.encode(message)), heard))
