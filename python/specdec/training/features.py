"""What the target computes on a text, once, in memory-mapped files: every feature of every token.

The files of a cache, for W windows of T tokens:

    tokens.bin      uint32, the text (corpus.write_tokens); window w is tokens w T to w T + T
    features.json   what the numbers belong to, and how many windows of each feature are there
    hidden-9.bin    bfloat16 bits [W, T, width] of feature hidden:9, one file a feature

Each window is read by the target on its own, from an empty state.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from itertools import groupby
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from specdec._checks import shown
from specdec.models import load_tokenizer
from specdec.models.checkpoint import files_sha256, write_json
from specdec.models.config import read_json_object
from specdec.models.features import Feature, FeatureTap
from specdec.training.corpus import TOKENS_NAME, TokenWindows, write_tokens
from specdec.training.target import FrozenModel

INDEX_NAME = "features.json"

_MAX_INDEX_BYTES = 1 << 20
_BATCH = 16  # windows that the target reads together
_EVERY = 20  # batches between two notes of what is done
_SPARE_BYTES = 256 << 20  # left free on the disk


class FeatureCache:
    """Features of one text by one target, in a directory that holds the text's `tokens.bin` already.

    What is there is kept; features of several choices can lie beside each other.

    Args:
        directory: of the cache.
        target: computes the features.
        seq_len: tokens T in a window.
        features: what is wanted; the target's last hidden state always is, as its distribution follows from
            it.

    Attributes:
        directory: as given.
        windows: W, how many the text has.
        tokens_sha256: of the text.

    Raises:
        ValueError: the target has no such feature, there is no text, or `features.json` is damaged or of
            other weights, tokens or windows: what a run may still need is not replaced.
    """

    def __init__(
        self, directory: Path, target: FrozenModel, seq_len: int, features: Sequence[Feature]
    ) -> None:
        self.directory = directory
        self._target = target
        self._seq_len = seq_len
        wanted = dict.fromkeys((target.last, *features))
        self._sizes = {feature: self._target.feature_size(feature) for feature in wanted}
        tokens = directory / TOKENS_NAME
        if not tokens.is_file():
            raise ValueError(f"{directory}: has no {TOKENS_NAME}, the text that the features are of")
        self.windows = (tokens.stat().st_size // 4 - 1) // seq_len
        self.tokens_sha256 = files_sha256([tokens])
        self._belongs = {
            "target_sha256": target.sha256,
            "tokens_sha256": self.tokens_sha256,
            "seq_len": seq_len,
        }
        self._done = self._read_index()
        self._maps: dict[Feature, np.memmap[tuple[int, ...], np.dtype[np.uint16]]] = {}

    @classmethod
    def reopen(
        cls,
        note: Mapping[str, str],
        target: FrozenModel,
        seq_len: int,
        features: Sequence[Feature],
        out: Path,
    ) -> FeatureCache:
        """The cache of the run in `out`, from what `note` said when it was saved.

        Raises:
            ValueError: its text or its features are not there any more.
        """
        place = Path(note["cache"])
        cache = cls(place, target, seq_len, features)
        if cache.missing_windows or note["tokens_sha256"] != cache.tokens_sha256:
            raise ValueError(f"{place}: does not hold the features of the run in {out} any more")
        return cache

    def note(self) -> dict[str, str]:
        """What a run keeps in order to find target and cache again."""
        return {
            "target": str(self._target.directory.resolve()),
            "cache": str(self.directory.resolve()),
            "tokens_sha256": self.tokens_sha256,
        }

    def size(self, feature: Feature) -> int:
        """Numbers that a feature has for each token."""
        return self._sizes[feature]

    @property
    def missing_windows(self) -> int:
        """How many windows the target has to read; again for features that are not equally far."""
        return sum(self.windows - done for done in {self._done.get(feature, 0) for feature in self._sizes})

    @property
    def missing_bytes(self) -> int:
        """What the features that are not there yet take on the disk."""
        return sum(
            (self.windows - self._done.get(feature, 0)) * self._seq_len * size * 2
            for feature, size in self._sizes.items()
        )

    def check_space(self) -> None:
        """Raise ValueError where the disk cannot take what is missing."""
        free = shutil.disk_usage(self.directory).free
        if self.missing_bytes + _SPARE_BYTES > free:
            raise ValueError(
                f"{self.directory}: the features take {self.missing_bytes / 1e6:,.1f} MB and "
                f"{free / 1e6:,.1f} MB are free, want fewer features or tokens of text, or another disk"
            )

    def compute(
        self,
        should_stop: Callable[[], bool] = lambda: False,
        on_windows: Callable[[int], None] = lambda count: None,
    ) -> bool:
        """Have the target compute what is missing; what is done is kept when this ends early.

        Args:
            should_stop: asked before every batch of windows.
            on_windows: called with the number of windows after every batch; they add up to
                `missing_windows`.

        Returns:
            True where everything is there.

        Raises:
            ValueError: the disk cannot take it. Nothing has been written then.
        """
        self.check_space()
        by_done = sorted(self._sizes, key=lambda feature: self._done.get(feature, 0))
        for done, group in groupby(by_done, key=lambda feature: self._done.get(feature, 0)):
            if done < self.windows and not self._compute(tuple(group), done, should_stop, on_windows):
                return False
        return True

    def _compute(
        self,
        features: tuple[Feature, ...],
        done: int,
        should_stop: Callable[[], bool],
        on_windows: Callable[[int], None],
    ) -> bool:
        tokens = np.memmap(self.directory / TOKENS_NAME, dtype=np.uint32, mode="r")
        sizes = [self._sizes[feature] for feature in features]
        maps = [self._map(feature, writable=True) for feature in features]

        def note() -> None:
            for values in maps:
                values.flush()
            self._done.update(dict.fromkeys(features, done))
            self._write_index()

        while done < self.windows:
            if should_stop():
                note()
                return False
            stop = min(done + _BATCH, self.windows)
            text = tokens[done * self._seq_len : stop * self._seq_len].reshape(stop - done, -1)
            tap = FeatureTap(features)
            self._target.read(torch.from_numpy(text.astype(np.int64)), tap)
            for values, part in zip(maps, torch.split(tap.rows(), sizes, dim=-1), strict=True):
                values[done:stop] = part.to(torch.bfloat16).cpu().contiguous().view(torch.uint16).numpy()
            on_windows(stop - done)
            done = stop
            if done // _BATCH % _EVERY == 0:
                note()
        note()
        return True

    def rows(self, windows: Sequence[int], features: Sequence[Feature]) -> Tensor:
        """float32 `[B, T, F]`: `features` of some windows side by side. All of them have been computed."""
        parts = [
            torch.from_numpy(self._map(feature)[np.asarray(windows)]).view(torch.bfloat16).float()
            for feature in features
        ]
        return torch.cat(parts, dim=-1)

    def _map(
        self, feature: Feature, writable: bool = False
    ) -> np.memmap[tuple[int, ...], np.dtype[np.uint16]]:
        path = self.directory / f"{feature.kind}-{feature.layer}.bin"
        shape = (self.windows, self._seq_len, self._sizes[feature])
        if writable:
            mode = "r+" if self._done.get(feature, 0) else "w+"
            return np.memmap(path, dtype=np.uint16, mode=mode, shape=shape)  # type: ignore[call-overload, no-any-return]
        if feature not in self._maps:
            self._maps[feature] = np.memmap(path, dtype=np.uint16, mode="r", shape=shape)
        return self._maps[feature]

    def _read_index(self) -> dict[Feature, int]:
        """How many windows of each feature are there and belong to this text and target."""
        path = self.directory / INDEX_NAME
        if not path.exists():
            return {}
        index = read_json_object(path, _MAX_INDEX_BYTES)
        done: dict[Feature, int] = {}
        for key, wanted in self._belongs.items():
            if index.get(key) != wanted:
                raise ValueError(
                    f"{path}: is of another {key.removesuffix('_sha256')} ({key} {shown(index.get(key))}, "
                    f"want {shown(wanted)}); name another cache, or delete this one"
                )
        try:
            for name, windows in index["done"].items():
                feature = Feature.parse(name)
                file = self.directory / f"{feature.kind}-{feature.layer}.bin"
                bytes_ = self.windows * self._seq_len * self._target.feature_size(feature) * 2
                if 0 < int(windows) <= self.windows and file.is_file() and file.stat().st_size == bytes_:
                    done[feature] = int(windows)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{path}: not the index of a feature cache ({error})") from None
        return done

    def _write_index(self) -> None:
        done = {str(feature): windows for feature, windows in self._done.items()}
        write_json(self.directory / INDEX_NAME, {**self._belongs, "done": done})


def place_tokens(
    model: str,
    text: Path,
    path: Path,
    *,
    seq_len: int,
    seed: int,
    most: int | None = None,
    eos_token_ids: Sequence[int] = (),
) -> int:
    """Has the text's tokens at `path`, a cache's `tokens.bin`; returns their number.

    Args:
        model: whose tokenizer is used, as for `load_tokenizer`.
        text: folder of texts.
        path: where the tokens go.
        seq_len: of the windows, two of which there have to be.
        seed: of the texts' order.
        most: tokens that are kept, None for all.
        eos_token_ids: see `write_tokens`.

    Raises:
        ValueError: the text is too short; or features of another one are there: a run may still need them.
    """
    new = path.with_name(f"{path.name}.{os.getpid()}.new")  # runs that begin together do not meet
    try:
        backend = load_tokenizer(model).backend
        total = write_tokens(text, backend, new, seed, most=most, eos_token_ids=eos_token_ids)
        TokenWindows(new, seq_len, seed)  # what is too short is not kept
        if not path.exists() or not path.with_name(INDEX_NAME).exists():  # no features of another text
            os.replace(new, path)
        elif files_sha256([path]) != files_sha256([new]):
            raise ValueError(
                f"cache: {str(path.parent)!r} holds features of another text (made with another --text, "
                "--text-tokens or --seed); name another directory, or delete this one"
            )
    finally:
        new.unlink(missing_ok=True)
    return total
