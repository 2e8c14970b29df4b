"""Times of short functions, taken in turn within one process."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

PAUSE = 0.02  # seconds
CALLS_A_TURN = 10
LEAST_TURNS = 5

Call = Callable[[], object]


def interleaved(
    functions: Mapping[str, Call | Sequence[Call]],
    seconds: float,
    *,
    layers: int,
    libraries: bool = False,
) -> dict[str, float]:
    """Microseconds of each function; they take turns for `seconds`, at least 5 turns.

    The order is random, so that no function always runs in the wake of the same other. In a turn a function
    runs back to back, as a model's layers call it, after a call that is not timed. The figure is the median
    of the wall times; with one thread that of the thread's own time, which waiting for a busy core does not
    touch.

    Args:
        functions: by name, a function or a sequence of them. A sequence is one thing made of several calls;
            these are timed one by one and their medians added, so that it meets no more interruptions than a
            single call does.
        seconds: for all of them together.
        layers: states that take turns.
        libraries: whether the functions belong to several libraries. A turn then begins with a pause in which
            the threads of the library before go to sleep (they spin for milliseconds), and a whole round over
            the layers is timed after one that is not: caches, threads and clock are then as in a decoding
            loop of that library.
    """
    clock = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter
    warm_up, timed = (layers, layers) if libraries else (1, CALLS_A_TURN)
    calls = {name: [f] if callable(f) else list(f) for name, f in functions.items()}
    times: dict[str, list[list[float]]] = {name: [[] for _ in parts] for name, parts in calls.items()}
    order = list(functions)
    shuffle = random.Random(0).shuffle
    stop = time.perf_counter() + seconds
    turns = 0
    while time.perf_counter() < stop or turns < LEAST_TURNS:
        for name in order:
            if libraries:
                time.sleep(PAUSE)
            parts = list(zip(calls[name], times[name], strict=True))
            for _ in range(warm_up):
                for part, _ in parts:
                    part()
            # As many calls a turn whether or not they are the parts of one thing.
            for _ in range(max(1, timed // len(parts))):
                for part, taken in parts:
                    begin = clock()
                    part()
                    taken.append((clock() - begin) * 1e6)
        shuffle(order)
        turns += 1
    return {name: sum(map(statistics.median, parts)) for name, parts in times.items()}


def bytes_of(*tensors: Tensor | None) -> int:
    """Bytes of the tensors' elements; None has none."""
    return sum(t.numel() * t.element_size() for t in tensors if t is not None)
