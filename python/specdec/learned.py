"""What is learned about a model while it runs, kept for the rest of the process."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, Generic, TypeVar
from weakref import WeakKeyDictionary

T = TypeVar("T")
_EVERY: list[PerModel[Any]] = []


def forget() -> None:
    """Forgets what was learned about all models in this process, for runs that must not depend on what ran
    before.
    """
    for kind in _EVERY:
        kind.clear()


class PerModel(Generic[T]):
    """One object for each model, and for each key beside it. Loops and drafters of a model share it, as what
    they learn is a matter of the model and of the machine: a new one does not begin at nothing.

    Args:
        make: makes the object of a model that is new.
    """

    def __init__(self, make: Callable[[], T]) -> None:
        self._make = make
        self._known: WeakKeyDictionary[object, dict[Hashable, T]] = WeakKeyDictionary()
        _EVERY.append(self)

    def clear(self) -> None:
        """Forgets everything; what was handed out stays as it is."""
        self._known.clear()

    def __call__(self, model: object, *key: Hashable) -> T:
        """The object of this model and key. A model that is not hashable or takes no weak references gets a
        new one with every call.
        """
        try:
            known = self._known.setdefault(model, {})
        except TypeError:
            return self._make()
        if key not in known:
            known[key] = self._make()
        return known[key]
