"""Reraises exceptions that signal handlers raise, in code that catches exceptions of the user's functions.

Python runs a signal handler in the main thread, between any two instructions. What the handler raises (a timeout
by ``signal.alarm``) is an exception of the interrupted code, and an ``except`` there catches it.
"""

import signal
from functools import partial
from traceback import walk_tb
from types import CodeType

from rankfeed.errors import RankfeedError


def reraise_interrupt(error: BaseException) -> None:
    """Raise the exception of a signal handler if this one is such, or was raised because of one."""
    cause: BaseException | None = error
    while cause is not None and not _is_of_handler(cause):
        cause = _origin_of(cause)
    if cause is None:
        return
    context = cause.__context__
    try:
        raise cause
    finally:
        cause.__context__ = context  # not the error, which has it as its cause: a cycle
        del cause, error


#: Code of the handlers that were installed when an iteration began: one may replace itself before it raises.
_INSTALLED: set[CodeType] = set()


def remember_handlers() -> None:
    """Recognise the exceptions of the present signal handlers also when they are replaced."""
    _INSTALLED.update(_present_handlers())


def _present_handlers() -> set[CodeType]:
    codes = (_code_of(signal.getsignal(signum)) for signum in signal.valid_signals())
    return {code for code in codes if code is not None}


def _is_of_handler(error: BaseException) -> bool:
    traceback = error.__traceback__
    if traceback is None or traceback.tb_next is None:  # no function of Python raised it
        return False
    handlers = _INSTALLED | _present_handlers()
    return any(frame.f_code in handlers for frame, _ in walk_tb(traceback))


def _origin_of(error: BaseException) -> BaseException | None:
    """The exception that led to an error of this package, or to one of `threading`."""
    if isinstance(error, RankfeedError):
        return error.__cause__
    # A Condition that is interrupted while it begins to wait raises: it releases a lock that it does not hold.
    frames = [frame for frame, _ in walk_tb(error.__traceback__)]
    return error.__context__ if frames and frames[-1].f_globals.get("__name__") == "threading" else None


def _code_of(handler: object) -> CodeType | None:
    """The code of a function, a method, a partial of one, or an object that can be called; None for others."""
    while isinstance(handler, partial):
        handler = handler.func
    function = handler if hasattr(handler, "__code__") else getattr(handler, "__call__", None)  # noqa: B004
    return getattr(function, "__code__", None)
