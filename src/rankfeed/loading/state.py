"""The state of a loader in a checkpoint: a position, and the plan and data that it belongs to."""

import warnings
from collections.abc import Callable, Collection, Mapping
from typing import Any, TypeVar

import msgspec

from rankfeed._util.validate import check_int
from rankfeed.errors import ArgumentError, RankfeedError, StateError, safe_repr, safe_str
from rankfeed.plan import Cursor, Plan, Schedule, Tail
from rankfeed.plan.plan import Int64
from rankfeed.sources import Source
from rankfeed.storage.commit import decodable

VERSION = 1
#: Properties of a plan that are options of a loader.
_OPTIONS = ("shuffle", "seed", "window", "lanes")
_State = TypeVar("_State", bound=msgspec.Struct)


@decodable
class LoaderState(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """The decoded form of a ``state_dict``."""

    rankfeed: int  # version of this layout
    epoch: int
    position: int  # samples delivered in the epoch, over all ranks
    steps: int  # steps delivered in it
    plan: dict[str, int | str]  # what the order depends on (``Plan.describe``)
    source: str = ""  # fingerprint of the data; empty if only their number was known


def encode_state(cursor: Cursor, plan: Mapping[str, int | str], source: str) -> dict[str, Any]:
    """A state as a dict of JSON types, the same on every rank."""
    position = {"epoch": cursor.epoch, "position": cursor.position, "steps": cursor.steps}
    return {"rankfeed": VERSION, **position, "plan": dict(plan), "source": source}


def decode_as(kind: type[_State], state: object) -> _State:
    """Decode a state of a given kind."""
    # Another version may have other fields: check it before them.
    version = state.get("rankfeed", VERSION) if isinstance(state, Mapping) else VERSION
    if isinstance(version, int) and version != VERSION:
        raise StateError(
            "the state has another version",
            expected=VERSION,
            found=version,
            remedy="read it with the rankfeed that wrote it",
        )
    try:
        return msgspec.convert(state, kind)
    except Exception as error:  # ValidationError, but of foreign types and hostile mappings anything
        raise StateError(
            "this is not a state of a rankfeed loader or sampler",
            found=safe_str(error),
            remedy="pass what state_dict() returned, unchanged",
        ) from None


def resume(
    state: object, plan: Any, source: Source | None, open_properties: Collection[str] = (), fingerprint: str = ""
) -> tuple[LoaderState, Any, Cursor]:
    """A decoded state, the plan that continues it, and its position, checked against the plan and the data.

    ``open_properties`` are those that the options of the loader leave open, ``fingerprint`` that of data without a
    source. Warns if the fingerprint of a source does not depend on the content of its data. `check_content` then
    compares the digest of samples that may follow it in a state.
    """
    parsed = decode_as(LoaderState, state)
    if source is not None:
        if isinstance(plan, Plan):
            plan = _restore_plan(plan, source.blocks, parsed.plan, open_properties)
        data, _, content = parsed.source.partition("-")
        fingerprint = source.fingerprint
        if not source.identified and data in (fingerprint, source.earlier_fingerprint):
            is_known = content or (source.tells_content and data == fingerprint)
            if not is_known and (parsed.epoch or parsed.position):
                warn_not_comparable(source)
            fingerprint = parsed.source
    return parsed, plan, _cursor_of(parsed, plan.describe(), fingerprint)


def _restore_plan(
    plan: Plan, blocks: Int64, saved: Mapping[str, int | str], open_properties: Collection[str]
) -> Plan:
    """The plan that a state continues: in its version of the order, and with its values of open properties."""
    own: dict[str, Any] = {"shuffle": plan.shuffle, "window": plan.window, "lanes": plan.lanes}
    taken = {name: saved[name] for name in open_properties if name in saved}
    if saved.get("shuffle") == "none":
        taken.pop("shuffle", None)  # of a job that did not shuffle
    try:
        if any(own[name] != value for name, value in taken.items()):
            plan = Plan(blocks, seed=plan.seed, **{**own, **taken})
        return plan.with_order(saved.get("order", 1))  # type: ignore[arg-type]
    except RankfeedError as error:
        raise StateError(
            "the plan of the checkpoint cannot be restored",
            expected=error.expected,
            found=f"{error.summary}: {error.found}",
            remedy=error.remedy,
        ) from error


def check_content(expected: str, other: str, source: Source) -> None:
    """Compare digests of samples; a StateError if they differ, a warning if the second is not known ("")."""
    if not other:
        warn_not_comparable(source)
    elif other != expected:
        raise StateError(
            "the checkpoint belongs to other data",
            expected=f"samples with the digest {expected}",
            found=f"{other}: the fingerprint of {safe_repr(source)} is the same, but samples have another content",
            remedy="resume with the same data; or begin an epoch with set_epoch() of a Loader without this state",
        )


def warn_not_comparable(source: Source) -> None:
    """Warn that the data of a state cannot be compared."""
    warnings.warn(
        f"the data of this checkpoint cannot be compared with {safe_repr(source)}: its samples differ each time "
        "they are read, or are not read before the first step; or an earlier version wrote the checkpoint. Give "
        "the Dataset an attribute `fingerprint`, a text that changes with its data.",
        stacklevel=5,
    )


def _cursor_of(state: LoaderState, plan: Mapping[str, int | str], source: str) -> Cursor:
    """The position of a state, checked against the plan and the data."""
    changed = [name for name in {**state.plan, **plan} if state.plan.get(name) != plan.get(name)]
    if len(changed) > 1 and "groups" in changed:
        changed.remove("groups")  # follows from the others
    old, new = ({name: facts.get(name, "not set") for name in changed} for facts in (state.plan, plan))
    differing = [f"{name} was {old[name]}, is {new[name]}" for name in changed]
    if state.source and source and state.source != source:
        differing.append(f"data fingerprint was {state.source}, is {source}")
    if differing:
        options = [f"{name}={state.plan[name]!r}" for name in _OPTIONS if name in changed and name in state.plan]
        remedy = "resume with the same data"
        if options:
            remedy = f"set {', '.join(options)}, as in the job that saved it"
        raise StateError(
            "the checkpoint belongs to other data or another plan",
            found="; ".join(differing),
            remedy=f"{remedy}; or begin an epoch with set_epoch()",
        )
    return check_cursor(state.epoch, state.position, state.steps, most=int(plan["samples"]))


def is_end(cursor: Cursor, num_samples: int, tail: Tail, schedule: Callable[[Cursor], Schedule]) -> bool:
    """Whether nothing is left of the epoch at a position; only for ``tail="drop"`` that depends on the ranks."""
    return not schedule(cursor) if tail == "drop" else cursor.position >= num_samples


def check_cursor(epoch: int, position: int, steps: int, most: int | None = None) -> Cursor:
    """The position of a state: of at most ``most`` samples, with at least one sample per step."""
    try:
        check_int("position", position, at_least=0, at_most=most)
        check_int("steps", steps, at_least=0, at_most=position)
        return Cursor(epoch, position, steps)
    except ArgumentError as error:
        raise StateError(
            "the checkpoint has an impossible position",
            expected=error.expected,
            found=f"{error.summary}: {error.found}",
        ) from error
