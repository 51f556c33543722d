"""All measurements, one after the other: ``python -m bench`` (or one of them: ``python -m bench.plan``)."""

import sys

from bench import audit, formats, lance, loader, parquet, plan, pyg, tars

if __name__ == "__main__":
    for each in (plan, loader, lance, tars, parquet, formats, pyg, audit):
        print(f"== {each.__name__}", file=sys.stderr)
        each.main()
