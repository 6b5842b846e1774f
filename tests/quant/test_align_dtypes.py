"""An aligned file holds every weight in the dtype that a draft holds it in, whatever the original's was."""

import jax.numpy as jnp
import numpy as np
import pytest
from eagle_cases import make
from eagle_loop import draft_config, make_target, target_config

from eaglejax.drafts.eagle.align_file import align_file, write_aligned
from eaglejax.drafts.eagle.files.read import read_draft
from eaglejax.drafts.eagle.files.write import tensors_of_weights, write_draft
from eaglejax.rotation.rotate import Rotation, rotate_target

MIXTURE = {"num_experts": 4, "experts_per_token": 2, "moe_intermediate_size": 10}


@pytest.mark.parametrize(
    ("version", "changes", "name"),
    [(1, {}, "feature_map.weight"), (3, {"aux": (0, 1, 2), **MIXTURE}, "layers.0.mlp.gate.weight")],
    ids=["eagle1", "mixture"],
)
def test_what_is_never_rounded_stays_so_in_an_aligned_half_precision_file(version, changes, name, tmp_path):
    """The map of an EAGLE-1 draft's features and the routers of a mixture (A69)."""
    target = make_target(target_config(num_layers=3), seed=6)
    turned = rotate_target(target, Rotation("random", 16, seed=3))
    config = draft_config(target.config, version, **changes)
    weights = make(config, dtype=jnp.bfloat16).weights
    for layer in weights["layers"]:
        if "router" in layer:
            layer["router"] = make(config).weights["layers"][0]["router"]
    write_draft(tmp_path / "draft", config, tensors_of_weights(config, weights), None, to="eaglejax")
    file = read_draft(tmp_path / "draft")
    write_aligned(tmp_path / "out", align_file(file, turned, turned.rotation), file)
    found = read_draft(tmp_path / "out").store
    assert found.dtype("fc.weight") == jnp.bfloat16
    assert found.dtype(name) == np.float32
    exact = np.asarray(found.array(name))
    assert not np.array_equal(exact, exact.astype(jnp.bfloat16).astype(np.float32))
