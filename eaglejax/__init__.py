"""Lossless EAGLE-family speculative decoding in JAX.

```python
import eaglejax as ej

target = ej.load_target("demo")
out = ej.generate(target, "def fibonacci(n):", proposer=ej.NGram(length=8), max_new_tokens=64)
print(out.text, out.stats.mean_acceptance_length)
```
"""

from eaglejax import devices

# Some settings are read only while jax starts, so this comes before every import that may start it.
devices.prepare()

from eaglejax.api import generate, stream  # noqa: E402
from eaglejax.checkpoint.target import load_target  # noqa: E402
from eaglejax.conversation import Conversation  # noqa: E402
from eaglejax.drafts.autoregressive import Autoregressive  # noqa: E402
from eaglejax.drafts.base import Bound  # noqa: E402
from eaglejax.drafts.draft_model.load import load_draft_model  # noqa: E402
from eaglejax.drafts.draft_model.proposer import DraftModel  # noqa: E402
from eaglejax.drafts.eagle.files.load import load_draft  # noqa: E402
from eaglejax.drafts.eagle.proposer import Eagle  # noqa: E402
from eaglejax.drafts.grow import DynamicTree  # noqa: E402
from eaglejax.drafts.ngram import NGram  # noqa: E402
from eaglejax.drafts.prediction import Prediction  # noqa: E402
from eaglejax.drafts.tree import StaticTree, chain, from_choices  # noqa: E402
from eaglejax.errors import EaglejaxError  # noqa: E402
from eaglejax.models.target import Target, random_target  # noqa: E402
from eaglejax.quant import Plan, calibrate, get_scheme, quantize_target  # noqa: E402
from eaglejax.sampling import Sampling  # noqa: E402
from eaglejax.speculate.generate import Generation, Piece  # noqa: E402

__version__ = "0.1.0"

__all__ = [
    "Autoregressive",
    "Bound",
    "Conversation",
    "DraftModel",
    "DynamicTree",
    "Eagle",
    "EaglejaxError",
    "Generation",
    "NGram",
    "Piece",
    "Plan",
    "Prediction",
    "Sampling",
    "StaticTree",
    "Target",
    "calibrate",
    "chain",
    "from_choices",
    "generate",
    "get_scheme",
    "load_draft",
    "load_draft_model",
    "load_target",
    "quantize_target",
    "random_target",
    "stream",
]
