"""Builds csrc/ with CMake into python/specdec/_lib and packages the result.

Everything declarative is in pyproject.toml. setuptools' own CUDA support needs a CUDA build of torch, so
CMake does the compiling; this file only drives it.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).resolve().parent


class CMakeExtension(Extension):
    """Stands for the whole CMake project: `_lib` is a directory of libraries, not one module."""

    def __init__(self) -> None:
        super().__init__("specdec._lib", sources=[])


class CMakeBuild(build_ext):
    """Configures and builds the CMake project into the package that is being built."""

    def build_extension(self, ext: Extension) -> None:
        in_source = self.inplace or self.editable_mode
        package = ROOT / "python" / "specdec" if in_source else Path(self.build_lib).resolve() / "specdec"
        library_dir = package / "_lib"
        build_dir = ROOT / "build" / "cmake"
        build_dir.mkdir(parents=True, exist_ok=True)
        # cmake and ninja may come from pip, beside an interpreter whose environment is not activated.
        scripts = str(Path(sys.executable).parent)
        env = {**os.environ, "PATH": os.pathsep.join([scripts, os.environ.get("PATH", "")])}
        subprocess.run(
            [
                "cmake",
                "-S",
                str(ROOT),
                "-B",
                str(build_dir),
                "-G",
                "Ninja",
                f"-DPython_EXECUTABLE={sys.executable}",
                f"-DSPECDEC_LIBRARY_DIR={library_dir}",
                f"-DSPECDEC_CUDA={os.environ.get('SPECDEC_CUDA', 'AUTO')}",
            ],
            check=True,
            env=env,
        )
        jobs = os.environ.get("MAX_JOBS") or str(os.cpu_count() or 1)
        subprocess.run(["cmake", "--build", str(build_dir), "--parallel", jobs], check=True, env=env)

    def get_outputs(self) -> list[str]:
        return []

    def copy_extensions_to_source(self) -> None:
        """In-place builds already write into the source tree."""


# There from the start, as setuptools warns of a directory that was missing when it looked for packages.
(ROOT / "python" / "specdec" / "_lib").mkdir(exist_ok=True)

setup(ext_modules=[CMakeExtension()], cmdclass={"build_ext": CMakeBuild})
