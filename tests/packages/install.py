"""Installs the sdist and the wheel into fresh environments, and uses them there.

``python -m tests.packages.install [EXTRA ...]`` is what ``make package`` runs: the wheel with torch alone, the
sdist without a C compiler, and the wheel with each extra. Torch is large: all environments see the one that is
installed for this interpreter, and those of extras see the environment of the wheel.
"""

import importlib.metadata
import os
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
import venv
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

from packaging.requirements import Requirement
from tests.packages.build import ROOT, build_all
from tests.packages.uses import PAGES, PROGRAMS
from tests.support.documented import program_of
from tests.support.environ import of_no_launcher

_NATIVE = "from rankfeed._util.native import native_library; assert (native_library() is not None) is {}"


def user_extras() -> list[str]:
    """The extras of pyproject.toml, without those for work on rankfeed itself."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return sorted(project["optional-dependencies"].keys() - {"dev", "docs"})


def link_distribution(name: str, target: Path) -> None:
    """Link an installed distribution and all that it requires into a folder of import packages."""
    distribution = importlib.metadata.distribution(name)
    for top in {file.parts[0] for file in distribution.files or ()} - {"..", "__pycache__"}:
        if not (target / top).exists():
            (target / top).symlink_to(str(distribution.locate_file(top)))
    for requirement in map(Requirement, distribution.requires or ()):
        if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
            link_distribution(requirement.name, target)


class Environment:
    """A virtual environment that also sees packages in other folders, with a folder in which programs run."""

    def __init__(self, folder: Path, *layers: Path, **environ: str) -> None:
        venv.EnvBuilder(symlinks=True).create(folder)
        self.bin, self.work, self.layers = folder / "bin", folder / "work", layers
        self.packages = next(folder.glob("lib/python*/site-packages"))
        (self.packages / "layers.pth").write_text("\n".join(map(str, layers)))
        self.work.mkdir()
        self._environ = of_no_launcher() | {"PATH": f"{self.bin}:{os.environ['PATH']}", "OMP_NUM_THREADS": "1"}
        self._environ |= environ
        for name in ("PYTHONPATH", "VIRTUAL_ENV"):
            self._environ.pop(name, None)

    def run(self, *command: str | Path, code: int = 0) -> str:
        """Run a command, expect its exit code, and return what it printed."""
        done = subprocess.run(
            command,
            cwd=self.work,
            env=self._environ,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=600,
            check=False,
        )
        shown = " ".join(map(str, command))
        assert done.returncode == code, f"{shown}\nexit code {done.returncode}\n{done.stdout[-6000:]}"
        return done.stdout

    def python(self, *arguments: str | Path) -> str:
        return self.run(self.bin / "python", *arguments)

    def install(self, *requirements: str | Path) -> None:
        pip = [sys.executable, "-m", "pip", "--python", self.bin / "python", "install", "--quiet"]
        self.run(*pip, *requirements)

    def program(self, name: str, text: str) -> None:
        script = self.work / f"program-{name}.py"
        script.write_text(text)
        self.python(script)

    def page(self, page: str) -> None:
        """Run the code of a page of the documentation."""
        program, files = program_of(ROOT / page)
        for name, text in files.items():
            (self.work / name).write_text(text)
        self.program(Path(page).stem, program)


def use_alone(environment: Environment, *, is_native: bool) -> None:
    """What needs no extra: the demo, the code of the README, and the error of a report, which needs one."""
    environment.python("-c", _NATIVE.format(is_native))
    assert "verdict: sound" in environment.run("rankfeed", "demo")
    environment.page("README.md")
    plan = ("rankfeed", "report", "--samples", "1000", "--ranks", "4")
    refused = environment.run(*plan, code=1)
    assert "pip install 'rankfeed[report]'" in refused, refused
    assert "Traceback" not in refused, refused


def use_extra(extra: str, environment: Environment) -> None:
    """What an extra is for: the code of its page, or a program."""
    if extra == "report":
        plan = ("-m", "rankfeed", "report", "--samples", "1000", "--ranks", "4")
        environment.python(*plan, "--out", "plan.html", "--png", "plan.png")
        assert "</html>" in (environment.work / "plan.html").read_text()
        assert (environment.work / "plan.png").read_bytes().startswith(b"\x89PNG")
    if extra in PAGES:
        environment.page(PAGES[extra])
    else:
        environment.program(extra, PROGRAMS[extra])


def main(chosen: list[str]) -> int:
    """Install and use the packages; the exit code is 1 if any of them fails."""
    os.environ.setdefault("PIP_CONSTRAINT", str(ROOT / "constraints.txt"))
    names = chosen or user_extras()
    failures: list[str] = []

    def attempt(title: str, step: Callable[[], None]) -> None:
        begun = time.monotonic()
        try:
            step()
        except Exception as error:  # the other packages are tried all the same
            failures.append(title)
            print(f"FAILED {title}: {error or repr(error)}", flush=True)
        else:
            print(f"{title}: {time.monotonic() - begun:.0f} s", flush=True)

    folder = Path(tempfile.mkdtemp(prefix="rankfeed-packages-"))
    try:
        sdist, wheel = build_all(folder)
        print(f"built {sdist.name} and {wheel.name}, {wheel.stat().st_size:,} bytes", flush=True)
        torch = folder / "torch"
        torch.mkdir()
        link_distribution("torch", torch)
        alone = Environment(folder / "wheel", torch)
        alone.install(wheel)

        def from_sdist() -> None:
            environment = Environment(folder / "sdist", torch, CC="/no/compiler")
            environment.install(sdist)
            use_alone(environment, is_native=False)

        def with_extra(extra: str) -> None:
            environment = Environment(folder / extra, alone.packages, torch)
            environment.install(f"{wheel}[{extra}]")
            use_extra(extra, environment)

        steps: list[tuple[str, Callable[[], None]]] = [
            (f"wheel with {name}", partial(with_extra, name)) for name in names
        ]
        if not chosen:
            steps += [("sdist without a compiler", from_sdist)]
            steps += [("wheel", partial(use_alone, alone, is_native=True))]
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            list(pool.map(lambda step: attempt(*step), steps))
    finally:
        shutil.rmtree(folder)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
