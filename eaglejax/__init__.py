"""Lossless EAGLE-family speculative decoding in JAX.

```python
import eaglejax as ej

target = ej.load_target("demo")
out = ej.generate(target, "def fibonacci(n):", proposer=ej.NGram(length=8), max_new_tokens=64)
print(out.text, out.stats.mean_acceptance_length)
```
"""

import importlib
import importlib.util
from typing import TYPE_CHECKING, Any

from eaglejax import devices

# Some settings are read only while jax starts, so this comes before every import that may start it.
devices.prepare()

if TYPE_CHECKING:
    from eaglejax.api import generate, stream
    from eaglejax.checkpoint.target import load_target
    from eaglejax.conversation import Conversation
    from eaglejax.drafts.autoregressive import Autoregressive
    from eaglejax.drafts.base import Bound, Request
    from eaglejax.drafts.cascade.proposer import Cascade, cascade
    from eaglejax.drafts.draft_model.load import load_draft_model
    from eaglejax.drafts.draft_model.proposer import DraftModel
    from eaglejax.drafts.eagle.proposer import Eagle
    from eaglejax.drafts.mtp.family import load_mtp
    from eaglejax.drafts.mtp.proposer import Mtp
    from eaglejax.drafts.ngram import NGram
    from eaglejax.drafts.prediction import Prediction
    from eaglejax.drafts.registry import load_draft
    from eaglejax.drafts.suffix.proposer import Suffix
    from eaglejax.drafts.tree import DynamicTree, StaticTree, chain, from_choices
    from eaglejax.engine.engine import Engine
    from eaglejax.errors import EaglejaxError
    from eaglejax.models.target import Target, random_target
    from eaglejax.quant.calibrate import calibrate
    from eaglejax.quant.quantize import quantize_target
    from eaglejax.quant.schemes import Plan, get_scheme
    from eaglejax.sampling import Sampling
    from eaglejax.speculate.books import Generation, Piece
    from eaglejax.speculate.options import DecodeOptions

__version__ = "0.1.0"

__all__ = [
    "Autoregressive",
    "Bound",
    "Cascade",
    "Conversation",
    "DecodeOptions",
    "DraftModel",
    "DynamicTree",
    "Eagle",
    "EaglejaxError",
    "Engine",
    "Generation",
    "Mtp",
    "NGram",
    "Piece",
    "Plan",
    "Prediction",
    "Request",
    "Sampling",
    "StaticTree",
    "Suffix",
    "Target",
    "calibrate",
    "cascade",
    "chain",
    "from_choices",
    "generate",
    "get_scheme",
    "load_draft",
    "load_draft_model",
    "load_mtp",
    "load_target",
    "quantize_target",
    "random_target",
    "stream",
]

_PLACES = {
    "Autoregressive": "eaglejax.drafts.autoregressive",
    "Bound": "eaglejax.drafts.base",
    "Cascade": "eaglejax.drafts.cascade.proposer",
    "Conversation": "eaglejax.conversation",
    "DecodeOptions": "eaglejax.speculate.options",
    "DraftModel": "eaglejax.drafts.draft_model.proposer",
    "DynamicTree": "eaglejax.drafts.tree",
    "Eagle": "eaglejax.drafts.eagle.proposer",
    "EaglejaxError": "eaglejax.errors",
    "Engine": "eaglejax.engine.engine",
    "Generation": "eaglejax.speculate.books",
    "Mtp": "eaglejax.drafts.mtp.proposer",
    "NGram": "eaglejax.drafts.ngram",
    "Piece": "eaglejax.speculate.books",
    "Plan": "eaglejax.quant.schemes",
    "Prediction": "eaglejax.drafts.prediction",
    "Request": "eaglejax.drafts.base",
    "Sampling": "eaglejax.sampling",
    "StaticTree": "eaglejax.drafts.tree",
    "Suffix": "eaglejax.drafts.suffix.proposer",
    "Target": "eaglejax.models.target",
    "calibrate": "eaglejax.quant.calibrate",
    "cascade": "eaglejax.drafts.cascade.proposer",
    "chain": "eaglejax.drafts.tree",
    "from_choices": "eaglejax.drafts.tree",
    "generate": "eaglejax.api",
    "get_scheme": "eaglejax.quant.schemes",
    "load_draft": "eaglejax.drafts.registry",
    "load_draft_model": "eaglejax.drafts.draft_model.load",
    "load_mtp": "eaglejax.drafts.mtp.family",
    "load_target": "eaglejax.checkpoint.target",
    "quantize_target": "eaglejax.quant.quantize",
    "random_target": "eaglejax.models.target",
    "stream": "eaglejax.api",
}
"""Where each name lives. Its module is imported when it is first asked for: a command that refuses its
arguments, or says its version, need not start jax."""


def __getattr__(name: str) -> Any:
    if name in _PLACES:
        value = getattr(importlib.import_module(_PLACES[name]), name)
    elif not name.startswith("_") and importlib.util.find_spec(f"{__name__}.{name}") is not None:
        value = importlib.import_module(f"{__name__}.{name}")
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
