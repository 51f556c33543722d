"""Worker processes that are forked from one clean server process.

The server (`rankfeed._util.workers.server`) is started by exec, imports what the workers need, and never runs the
user's ``__main__``. So no process that has threads is forked, and scripts without a main guard, notebooks and
lambdas work. Linux only: it needs memfd and pidfd.
"""

from rankfeed._util.workers.channel import Channel, PeerGoneError
from rankfeed._util.workers.pool import Payload, WorkerPool, is_supported

__all__ = ["Channel", "Payload", "PeerGoneError", "WorkerPool", "is_supported"]
