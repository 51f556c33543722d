"""Runs programs one after the other, each in a fork of one process: torch is imported once for all of them.

``programs.py < [{"script": ..., "log": ...}, ...]`` prints the exit status of each, as a JSON list. A program runs
in the folder of its script.
"""

import json
import os
import runpy
import sys


def main() -> None:
    programs = json.load(sys.stdin)
    import torch  # noqa: F401

    import rankfeed.loading
    import rankfeed.prepare
    import rankfeed.sources
    import rankfeed.writer  # noqa: F401

    statuses = []
    for program in programs:
        child = os.fork()
        if not child:
            return run(program["script"], program["log"])
        statuses.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    print(json.dumps(statuses))
    return None


def run(script: str, log: str) -> None:
    folder = os.path.dirname(script)
    out = os.open(log, os.O_WRONLY | os.O_CREAT)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(out, 1)
    os.dup2(out, 2)
    os.chdir(folder)
    os.environ["PYTHONPATH"] = os.pathsep.join([folder, os.environ.get("PYTHONPATH", "")]).strip(os.pathsep)
    sys.argv = [script]
    sys.path[0] = folder
    runpy.run_path(script, run_name="__main__")


if __name__ == "__main__":
    main()
