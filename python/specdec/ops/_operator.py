"""Calls the raw operators so that a wrong argument gives one clear error: name, given, wanted.

Names are those of the Python wrappers: the operators take factors and pending commits apart into tensors,
whose arguments in the schema are `pending_k` and the like.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from specdec._checks import shown
from specdec.ops._load import cuda_loaded, load

load()

# STD_TORCH_CHECK raises RuntimeError("function, path/csrc/torch/file.cpp:line, message").
_CHECK = re.compile(r"^[^\n]*?csrc/torch/\w+\.(?:cpp|h):\d+, ", re.DOTALL)
# The dispatcher's, for a value that the schema has no room for.
_TYPE = re.compile(
    r"specdec\w*::(\w+)\(\) Expected a value of type '(.+?)' for argument '(\w+)' "
    r"but instead found type '(.+?)'"
)
_WANTED = {
    "Tensor": "a tensor",
    "Optional[Tensor]": "a tensor or None",
    "float": "a number",
    "Optional[float]": "a number or None",
    "bool": "True or False",
    "int": "an integer",
}


def argument_names(op: str) -> list[str]:
    """The arguments of an operator as its wrapper's users know them: "pending.factors.k" for `pending_k`."""
    schema = getattr(torch.ops.specdec, op).default._schema
    return [_public(op, argument.name) for argument in schema.arguments]


def operator(op: str, namespace: str = "specdec") -> Callable[..., Any]:
    """The operator, with clear errors. The operators are for inference: none has a backward.

    Raises (the function that is returned):
        ValueError: an argument has the wrong dtype, shape, stride, device or value, or it requires grad while
            grad mode is on: the result would look differentiable and give no gradient.
        TypeError: an argument has the wrong type.
    """
    # Bound once: the attribute walk torch.ops.specdec.<op>.default costs more than the checks of a call.
    raw = getattr(getattr(torch.ops, namespace), op).default
    names = argument_names(op)

    def call(*arguments: Any) -> Any:
        if torch.is_grad_enabled():
            _refuse_grad(names, arguments)
        try:
            return raw(*arguments)
        except RuntimeError as error:
            raise argument_error(error, names, arguments) from None

    return call


def argument_error(error: RuntimeError, names: Sequence[str], arguments: Sequence[object]) -> Exception:
    """The ValueError or TypeError for a failed check, without its place in the source; others unchanged."""
    text = str(error)
    if isinstance(error, NotImplementedError):  # torch found no kernel for the tensors
        for name, value in named_tensors(names, arguments):
            if value.layout != torch.strided:
                return ValueError(f"{name}: got a tensor of layout {value.layout}, want torch.strided")
            if value.device.type != "cpu":
                return ValueError(f"{name}: got a tensor on {value.device}, want cpu{_cuda_hint(value)}")
    if (found := _CHECK.match(text)) is not None:
        return ValueError(text[found.end() :])
    if (found := _TYPE.match(text)) is not None:
        op, want, name, got = found.groups()
        return TypeError(f"{_public(op, name)}: got {got}, want {_WANTED.get(want, want)}")
    return error


def named_tensors(names: Sequence[str], arguments: Sequence[object]) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors among the arguments of an operator, those in lists by their place: "states[1]"."""
    for name, value in zip(names, arguments, strict=False):  # defaults may be left out
        if isinstance(value, torch.Tensor):
            yield name, value
        elif isinstance(value, list):
            for place, part in enumerate(value):
                if isinstance(part, torch.Tensor):
                    yield f"{name}[{place}]", part


def _cuda_hint(value: torch.Tensor) -> str:
    if value.device.type != "cuda" or cuda_loaded():
        return ""
    return " (no CUDA operators are built: install specdec where torch has CUDA and nvcc is found)"


def want_type(name: str, value: object, *types: type) -> None:
    """Raises TypeError unless `value` is of one of the types."""
    if not isinstance(value, types):
        want = " or ".join(type_.__name__ for type_ in types)
        raise TypeError(f"{name}: got {type(value).__name__}, want {want}")


def want_tensor(name: str, value: object) -> None:
    """Raises for what is no tensor as an operator does, where the operator itself takes None too."""
    if value is None:
        raise ValueError(f"{name}: got None, want a tensor")
    if not isinstance(value, torch.Tensor):
        raise TypeError(f"{name}: got {type(value).__name__}, want a tensor")


def code_of(name: str, value: object, codes: Mapping[Any, int]) -> int:
    """The operator's number for one of a few names. Raises ValueError for any other value."""
    # A list would not be found but be "unhashable", so it is not looked up.
    code = codes.get(value) if value is None or isinstance(value, str) else None
    if code is None:
        raise ValueError(f"{name}: got {shown(value)}, want {' or '.join(map(repr, codes))}")
    return code


def _refuse_grad(names: list[str], arguments: tuple[Any, ...]) -> None:
    for name, value in zip(names, arguments, strict=False):  # defaults may be left out
        tensors = value if isinstance(value, list) else (value,)
        if any(isinstance(tensor, torch.Tensor) and tensor.requires_grad for tensor in tensors):
            raise ValueError(
                f"{name}: got a tensor that requires grad, want inference: the operators have no backward "
                "(call them under torch.no_grad(), or pass .detach())"
            )


def _public(op: str, name: str) -> str:
    group, _, part = name.partition("_")
    if op == "tree_attention":  # its prefix comes in arguments of its own
        return name
    if group in ("pending", "prefix") and part not in ("", "mixed"):  # a list; an argument of its own
        return f"{group}.factors.{part}" if part in ("k", "u", "g") else f"{group}.{part}"
    if op == "commit":
        return {"k": "factors.k", "u": "factors.u", "g": "factors.g", "how": "mode"}.get(name, name)
    return name
