"""Makes sure that the running interpreter's environment has a torch that specdec can use.

A torch that is already there is kept, with or without CUDA. Otherwise the CPU build is asked for by its local
version, which the indexes that carry one serve, and then the plain version, which is a CPU build on macOS and
Windows.
"""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version

WANTED = "2.13.0"
OLDEST = (2, 11)


def installed() -> str | None:
    """The version of torch in this environment, or None."""
    try:
        return version("torch")
    except PackageNotFoundError:
        return None


def main() -> int:
    """Returns the exit status."""
    have = installed()
    if have is not None:
        major, minor = (int(part) for part in have.split(".")[:2])
        if (major, minor) < OLDEST:
            print(f"torch {have} is too old: specdec needs {OLDEST[0]}.{OLDEST[1]} or newer", file=sys.stderr)
            return 1
        return 0
    for wanted in (f"torch=={WANTED}+cpu", f"torch=={WANTED}"):
        pip = [sys.executable, "-m", "pip", "install", "-q", wanted]
        if subprocess.run(pip, stderr=subprocess.DEVNULL).returncode == 0:
            return 0
    message = f"could not install torch {WANTED}; install torch >= 2.11 into this environment yourself"
    print(message, file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
