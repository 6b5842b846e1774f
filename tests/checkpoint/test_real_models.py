"""The two demonstration models against transformers, over text in English, Chinese and code."""

from __future__ import annotations

import numpy as np
import pytest

from eaglejax.checkpoint.sources import resolve
from eaglejax.checkpoint.target import load_target
from eaglejax.errors import CheckpointError
from eaglejax.models import decoder
from eaglejax.nn.visible import Causal

TEXTS = {
    "english": (
        "The harbour was quiet when the last ferry came in. A few people stood under the lamps and "
        "waited for their "
        "luggage, and somewhere behind the warehouses a dog barked at the tide. Maria counted her "
        "coins twice before "
        "she walked up to the ticket office. The clerk, an old man with a wool cap, told her that "
        "the morning boat "
        "would leave at six, weather permitting, and that she could sleep on the bench in the "
        "waiting room if she "
        "did not mind the draught. She thanked him, bought a cup of tea from the machine, and opened "
        "the letter again."
    ),
    "chinese": (
        "清晨的市场很热闹。卖菜的老人把新鲜的豆角和西红柿摆得整整齐齐，孩子们背着书包从摊位中间跑过去。"
        "我在拐角的小店里买了一碗豆腐脑，坐在门口慢慢地吃。老板说，今年雨水多，山上的蘑菇长得特别好，"
        "下个星期他打算带着家人一起去采。远处传来火车的汽笛声，新的一天就这样开始了。"
    ),
    "code": (
        "from collections import deque\n\n\ndef shortest_path(graph, start, goal):\n"
        '    """Return the fewest-edges path from start to goal, or None."""\n'
        "    queue = deque([start])\n    came_from = {start: None}\n    while queue:\n        node = "
        "queue.popleft()\n"
        "        if node == goal:\n            path = []\n            while node is not None:\n"
        "                path.append(node)\n                node = came_from[node]\n            "
        "return path[::-1]\n"
        "        for neighbour in graph[node]:\n            if neighbour not in came_from:\n"
        "                came_from[neighbour] = node\n                queue.append(neighbour)\n    "
        "return None\n"
    ),
}


@pytest.fixture
def own_cache():
    """Real models stay in the user's cache."""


@pytest.mark.slow
@pytest.mark.parametrize("word", ["demo", "demo-gemma"])
def test_top_token_agrees_with_transformers_in_f32(word):
    """Where the top token differs, the two must be a tie within f32 noise; the gap is printed."""
    import jax
    import jax.numpy as jnp
    import torch
    import transformers

    try:
        path = resolve(word).path
    except CheckpointError as error:
        pytest.skip(f"no network: {error}")
    target = load_target(path, dtype="float32")
    config, params = target.config, target.params
    tokens = {name: np.asarray(target.tokenizer.encode(text)) for name, text in TEXTS.items()}
    theirs = transformers.AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    for name, text in TEXTS.items():
        assert tokens[name].tolist() == theirs.encode(text), name
    longest = max(map(len, tokens.values()))
    cache = decoder.init_cache(config, 1, longest)

    @jax.jit
    def logits(params, ids):
        with jax.default_matmul_precision("highest"):
            out = decoder.forward(params, config, ids, jnp.arange(longest)[None], cache, Causal())
            return decoder.unembed(params, config, out.hidden)[0]

    ours = {
        name: np.asarray(logits(params, jnp.asarray(np.pad(ids, (0, longest - len(ids)))[None])))[: len(ids)]
        for name, ids in tokens.items()
    }
    del target, params
    model = transformers.AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, dtype="float32", attn_implementation="eager"
    ).eval()
    for name, ids in tokens.items():
        with torch.no_grad():
            want = model(torch.asarray(ids[None])).logits[0].numpy()
        got = ours[name]
        largest = np.abs(got - want).max()
        flips = np.flatnonzero(got.argmax(-1) != want.argmax(-1))
        gaps = [float(want[i].max() - want[i, got[i].argmax()]) for i in flips]
        print(
            f"{word} {name}: {len(ids)} positions, {len(flips)} top-1 differences (gaps {gaps}), "
            f"largest logit difference {largest:.2e} of {np.abs(want).max():.1f}"
        )
        assert largest < 2e-4 * np.abs(want).max()
        assert all(gap < 1e-3 for gap in gaps)
