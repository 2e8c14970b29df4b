"""Exact, fast speculative decoding for models whose memory is a recurrent state.

    import specdec

    model = specdec.load_model("gdn-code")
    loop = specdec.Loop(model, specdec.NGramDrafter())
    result = loop.run([specdec.Request(prompt=[0, 293, 3814])])[0]

`specdec.ops` has the operators by themselves. Names are imported on first use, so that `import specdec` is
cheap.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from specdec.acceptance.params import SamplingParams as SamplingParams
    from specdec.budget import DraftBudget as DraftBudget
    from specdec.cache import DecodingCache as DecodingCache
    from specdec.drafters.model import ModelDrafter as ModelDrafter
    from specdec.drafters.ngram import NGramDrafter as NGramDrafter
    from specdec.drafters.oracle import OracleDrafter as OracleDrafter
    from specdec.generation import Request as Request
    from specdec.generation import Result as Result
    from specdec.generation import Statistics as Statistics
    from specdec.loop import Loop as Loop
    from specdec.models import load_model as load_model
    from specdec.models import load_tokenizer as load_tokenizer
    from specdec.tree import TokenTree as TokenTree

_HOME = {
    "DecodingCache": "specdec.cache",
    "DraftBudget": "specdec.budget",
    "Loop": "specdec.loop",
    "ModelDrafter": "specdec.drafters.model",
    "NGramDrafter": "specdec.drafters.ngram",
    "OracleDrafter": "specdec.drafters.oracle",
    "Request": "specdec.generation",
    "Result": "specdec.generation",
    "SamplingParams": "specdec.acceptance.params",
    "Statistics": "specdec.generation",
    "TokenTree": "specdec.tree",
    "load_model": "specdec.models",
    "load_tokenizer": "specdec.models",
}

__all__ = ["__version__", *_HOME]


def __dir__() -> list[str]:
    """Also what was not imported yet."""
    return sorted({*globals(), *_HOME})


def __getattr__(name: str) -> Any:
    home = _HOME.get(name)
    if home is None:
        raise AttributeError(f"module 'specdec' has no attribute {name!r}")
    return getattr(import_module(home), name)
