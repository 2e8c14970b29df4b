"""Turns the argument checks of the operator library into ValueError."""

from __future__ import annotations

import re

# STD_TORCH_CHECK raises RuntimeError("function, path/csrc/torch/file.cpp:line, message").
_CHECK = re.compile(r"^[^\n]*?csrc/torch/\w+\.(?:cpp|h):\d+, ", re.DOTALL)


def argument_error(error: RuntimeError) -> Exception:
    """The ValueError for a failed argument check, without its place in the source; other errors unchanged."""
    if isinstance(error, NotImplementedError):  # torch found no kernel for the device of the tensors
        return ValueError(f"device: want cpu tensors ({str(error).partition('. ')[0]})")
    text = str(error)
    found = _CHECK.match(text)
    return error if found is None else ValueError(text[found.end() :])
