"""The command line: ``python -m rankfeed``."""

from rankfeed.cli import main

if __name__ == "__main__":
    main()
