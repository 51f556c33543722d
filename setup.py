"""Builds the native library, which needs neither Python's headers nor its ABI: one wheel serves every Python.

Without a C compiler the package is installed as pure Python, which copies rows one by one.
"""

from pathlib import Path
from shutil import copytree, ignore_patterns

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext
from setuptools.command.build_py import build_py

LIBRARY = "rankfeed._util._native"


class BuildLibrary(build_ext):
    def get_ext_filename(self, fullname):
        return str(Path(*fullname.split("."))) + ".so"

    def get_export_symbols(self, ext):
        return ext.export_symbols


class BuildPackage(build_py):
    def run(self):
        super().run()
        if not self.editable_mode:  # what `rankfeed demo` runs and reads
            target = Path(self.build_lib, "rankfeed", "examples")
            copytree("examples", target, ignore=ignore_patterns("__pycache__"), dirs_exist_ok=True)


class Wheel(bdist_wheel):
    def get_tag(self):
        is_built = any(Path(self.bdist_dir).rglob("_native.so"))
        return "py3", "none", super().get_tag()[2] if is_built else "any"


setup(
    ext_modules=[
        Extension(
            LIBRARY,
            ["src/rankfeed/_util/_native.c"],
            extra_compile_args=["-O3", "-fvisibility=hidden", "-pthread"],
            extra_link_args=["-pthread"],
            optional=True,
        )
    ],
    cmdclass={"build_ext": BuildLibrary, "build_py": BuildPackage, "bdist_wheel": Wheel},
)
