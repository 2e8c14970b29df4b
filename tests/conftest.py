"""Fixtures shared by the tests."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch

from specdec.learned import forget


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    """torch on one thread: fastest for tiny tensors, also where the machine is busy. Tests of threading ask
    for more with `set_threads`.
    """
    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def nothing_learned() -> None:
    """A test begins with what a new process knows about a model's speed and its drafters."""
    forget()


@pytest.fixture
def set_threads() -> Iterator[Callable[[int], None]]:
    """`torch.set_num_threads`, taken back after the test."""
    yield torch.set_num_threads
    torch.set_num_threads(1)
