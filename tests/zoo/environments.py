"""Environments of peers that cannot live with the others: own packages, and the project's for the rest."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import rankfeed as rf

ROOT = Path(__file__).parents[2]
#: What a peer must not bring a version of its own of.
KEPT = ("torch", "numpy", "pyarrow")


def interpreter(requirement: str) -> Path:
    """The interpreter of an environment with a package; made where there is none, and kept from run to run."""
    if not requirement:
        return Path(sys.executable)
    root = Path(os.environ.get("RANKFEED_ZOO_ENVIRONMENTS") or Path.home() / ".cache" / "rankfeed-zoo")
    shared = sysconfig.get_path("purelib")

    def build(folder: Path) -> None:
        run = [sys.executable, "-m", "venv", "--without-pip", str(folder)]
        subprocess.run(run, check=True, timeout=300)
        own = Path(sysconfig.get_path("purelib", vars={"base": str(folder), "platbase": str(folder)}))
        (own / "project.pth").write_text(f"{shared}\n")
        pins = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if line.startswith(KEPT)]
        (folder / "kept.txt").write_text("\n".join(pins))
        install = [
            str(folder / "bin" / "python"),
            "-m",
            "pip",
            "install",
            "--quiet",
            "--prefer-binary",
            requirement,
        ]
        environ = {**os.environ, "PIP_CONSTRAINT": str(folder / "kept.txt")}
        subprocess.run(install, env=environ, check=True, timeout=1200)
        assert not (own / "torch").exists(), "torch is the project's"

    name, _, version = requirement.partition("==")
    key = f"{version} beside {shared}"
    return rf.prepare_once(root / f"{name}-{version}", build, key=key) / "bin" / "python"
