"""An exception that carries the traceback text of another process, as the cause of an error raised here."""


class RemoteTraceback(Exception):
    """Traceback in a worker or in the process that builds, as text; the cause of the error raised here."""

    def __str__(self) -> str:
        return f"\n{self.args[0]}"
