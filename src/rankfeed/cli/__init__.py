"""The ``rankfeed`` command."""


def main() -> None:
    """Run the command (imported when it runs: a library's user never pays for it)."""
    from rankfeed.cli.app import main as run

    run()


__all__ = ["main"]
