"""Every published form of an EAGLE draft is understood, to the same draft."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from eagle_files import (
    FLAT,
    FLAT1,
    HD,
    MADE,
    VD,
    V,
    make,
    maps,
    midlayer,
    rename,
    save,
    speculators_config,
)
from eagle_logits import SGLANG, TARGET_CONFIG, logits, target

from eaglejax.drafts.eagle.files.load import draft_plan
from eaglejax.drafts.eagle.files.names import plain_name
from eaglejax.drafts.eagle.files.read import read_draft
from eaglejax.drafts.eagle.files.report import report as describe
from eaglejax.errors import CheckpointError


def nested(name: str) -> str:
    return "draft_model.model." + midlayer(name)


def nemo(name: str) -> str:
    return name if name == "lm_head.weight" else "model." + name


EMBED = {"embed_tokens.weight": np.asarray(target().params["embed"])}

EAGLE3_FORMS = {
    # name: (tensors, config, file form, layout)
    "safeailab-bin": (rename(MADE.tensors, midlayer) | maps(MADE), FLAT, "bin", "midlayer"),
    "safeailab-safetensors": (rename(MADE.tensors, midlayer) | maps(MADE), FLAT, "safetensors", "midlayer"),
    "specforge": (
        rename(MADE.tensors, midlayer) | maps(MADE) | EMBED,
        SGLANG
        | {
            "rope_theta": 10000,
            "rope_scaling": None,
            "head_dim": HD,
            "eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 2, 3]},
            "norm_output": False,
        },
        "safetensors",
        "midlayer",
    ),
    "specforge-sharded": (rename(MADE.tensors, midlayer) | maps(MADE), SGLANG, "sharded", "midlayer"),
    "angelslim": (rename(MADE.tensors, midlayer) | maps(MADE), SGLANG | {"head_dim": HD}, "bin", "midlayer"),
    "speculators": (
        MADE.tensors
        | maps(MADE)
        | EMBED
        | {
            "verifier_lm_head.weight": MADE.tensors["lm_head.weight"],
            "verifier_norm.weight": MADE.tensors["norm.weight"],
        },
        speculators_config(eagle_aux_hidden_state_layer_ids=[2, 3, 4]),
        "safetensors",
        "speculators",
    ),
    "speculators-without-d2t": (
        MADE.tensors | {"t2d": maps(MADE)["t2d"]},
        speculators_config(),
        "safetensors",
        "speculators",
    ),
    "modelopt": (
        MADE.tensors | maps(MADE, t2d=False),
        SGLANG
        | {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 2, 3], "use_aux_hidden_state": True}},
        "safetensors",
        "modelopt",
    ),
    "modelopt-early": (
        rename(MADE.tensors, midlayer) | maps(MADE, t2d=False),
        SGLANG,
        "safetensors",
        "midlayer",
    ),
    "nemo": (rename(MADE.tensors | maps(MADE) | EMBED, nemo), SGLANG, "safetensors", "nemo"),
    "nested": (rename(MADE.tensors | maps(MADE), nested), FLAT, "safetensors", "midlayer"),
}


@pytest.mark.parametrize("name", EAGLE3_FORMS)
def test_every_eagle3_form_is_the_same_draft(name, tmp_path):
    """A62, A52: same logits, same map, same boundaries, whatever the names and the container."""
    tensors, config, form, layout = EAGLE3_FORMS[name]
    want, base, _ = logits(save(tmp_path / "base", rename(MADE.tensors, midlayer) | maps(MADE), FLAT))
    got, read, file = logits(save(tmp_path / "it", tensors, config, form=form))
    np.testing.assert_array_equal(got, want)
    np.testing.assert_array_equal(file.ids, MADE.ids)
    assert read.aux == base.aux == (2, 3, 4)
    assert (read.version, read.head_dim, read.rope.theta) == (3, HD, 10000.0)
    assert file.layout.startswith(layout)
    assert got.shape[-1] == VD


@pytest.mark.parametrize("name", EAGLE3_FORMS)
def test_every_eagle3_form_is_strict_and_inspected(name, tmp_path):
    """Each missing weight, a stray one and one that comes under two names are refused in every form, and
    inspect says the same of all: method, map, what is borrowed, which target fits and why not."""
    tensors, config, _, layout = EAGLE3_FORMS[name]
    folder = tmp_path / "it"

    def understood(changed):
        file = read_draft(save(folder, changed, config))
        draft_plan(file, jnp.float32)
        return file

    weights = [n for n in tensors if plain_name(n) in MADE.tensors]
    assert len(weights) == len(MADE.tensors)
    for lost in weights:
        with pytest.raises(CheckpointError, match="lacks"):
            understood({n: v for n, v in tensors.items() if n != lost})
    wrapped = {"draft_model." + n: tensors[n] for n in weights[:1]}
    with pytest.raises(CheckpointError, match="twice"):
        understood(tensors | wrapped)
    stray = weights[-1].rsplit(".", 1)[0] + ".scale"
    with pytest.raises(CheckpointError, match="no use for"):
        understood(tensors | {stray: np.ones(3, np.float32)})

    file = understood(tensors)
    report = describe(file, TARGET_CONFIG)
    assert report["method"] == "eagle3"
    assert report["layout"].startswith(layout)
    assert report["borrows"] == ([] if file.config.own_embedding else ["embedding"])
    assert report["vocabulary"]["draft"] == VD
    assert report["vocabulary"]["coverage"] == VD / V
    assert report["target"] == {"fits": True, "why_not": None, "boundaries": [2, 3, 4]}
    for change, why in (({"vocab_size": 50}, "of 40"), ({"hidden_size": 20}, "width 16")):
        other = describe(file, dataclasses.replace(TARGET_CONFIG, **change))["target"]
        assert not other["fits"]
        assert why in other["why_not"]


@pytest.mark.parametrize("form", ["bin", "vllm", "no-bias"])
def test_eagle1_forms(form, tmp_path):
    """SafeAILab's .bin with its embedding and bias; vLLM's conversion with the target's head; a file without
    bias."""
    made = make(1)
    base, config, _ = logits(save(tmp_path / "base", made.tensors, FLAT1))
    assert (config.version, config.fc_bias, config.own_embedding, config.own_head) == (1, True, True, False)
    if form == "bin":
        got, *_ = logits(save(tmp_path / "it", made.tensors, FLAT1, form="bin"))
        np.testing.assert_array_equal(got, base)
    elif form == "vllm":
        head = {"lm_head.weight": np.asarray(target().params["head"]).T}
        tensors = rename(made.tensors | head, nemo)
        got, config, file = logits(save(tmp_path / "it", tensors, FLAT1 | {"eagle_fc_bias": True}))
        np.testing.assert_array_equal(got, base)
        assert (config.own_head, file.layout) == (True, "vllm-eagle1")
    else:
        tensors = {k: v for k, v in made.tensors.items() if k != "fc.bias"}
        got, config, _ = logits(save(tmp_path / "it", tensors, FLAT1 | {"bias": False}))
        assert not config.fc_bias
        assert not np.allclose(got, base)
        with pytest.raises(CheckpointError, match="fc has a bias"):
            read_draft(save(tmp_path / "lie", tensors, FLAT1 | {"bias": True}))


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.float64], ids=str)
def test_bin_files_hold_every_float(dtype, tmp_path):
    """Storages of every float type, a view into a larger storage and a parameter are read as PyTorch reads
    them."""
    import torch

    made = make(dtype=dtype)
    folder = save(tmp_path / "it", rename(made.tensors, midlayer) | maps(made), FLAT, form="bin")
    path = folder / "pytorch_model.bin"
    state = torch.load(path, weights_only=True)
    big = torch.arange(64, dtype=state["norm.weight"].dtype)
    state["norm.weight"] = big[16:48:2]
    state["midlayer.hidden_norm.weight"] = torch.nn.Parameter(state["midlayer.hidden_norm.weight"])
    state["fc.weight"] = state["fc.weight"].T.contiguous().T
    torch.save(state, path)
    store = read_draft(folder).store
    for name, value in state.items():
        got = store.array(name.replace("midlayer.", "layers.0."))
        np.testing.assert_array_equal(np.asarray(got, np.float64), value.detach().to(torch.float64).numpy())


def test_a_bin_that_would_run_code_is_refused(tmp_path):
    """Weights-only: the pickle may name tensors and nothing else; damage is refused by name."""
    import torch

    class Evil:
        def __reduce__(self):
            return (print, ("never",))

    folder = save(tmp_path / "it", {}, FLAT)
    (folder / "model.safetensors").unlink()
    path = folder / "pytorch_model.bin"
    torch.save({"fc.weight": Evil()}, path)
    with pytest.raises(CheckpointError, match=r"builtin\S*\.print"):
        read_draft(folder)
    torch.save({"fc.weight": torch.zeros(2), "step": 3}, path)
    with pytest.raises(CheckpointError, match="dict of tensors"):
        read_draft(folder)
    torch.save({"fc.weight": torch.zeros(2)}, path, _use_new_zipfile_serialization=False)
    with pytest.raises(CheckpointError, match=r"PyTorch 1\.6"):
        read_draft(folder)
    torch.save({"fc.weight": torch.zeros(2000)}, path)
    path.write_bytes(path.read_bytes()[:4000])
    with pytest.raises(CheckpointError, match="zip archive"):
        read_draft(folder)
    path.unlink()
    with pytest.raises(CheckpointError, match="no weights"):
        read_draft(folder)
