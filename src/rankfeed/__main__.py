"""Runs the ``rankfeed`` command: ``python -m rankfeed``."""

from rankfeed.cli import main

if __name__ == "__main__":
    main()
