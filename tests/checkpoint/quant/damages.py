"""Ways to damage a quantised folder, by layout and case: (scheme, what is done to it, the refusal)."""

import numpy as np
import packed_targets as tiny

Q = "model.layers.0.self_attn.q_proj."
DOWN = "model.layers.1.mlp.down_proj."
DESCRIPTION = "quant_model_description.json"


def tensors(change):
    return lambda folder: tiny.edit_tensors(folder, change)


def described(change):
    return lambda folder: tiny.edit_json(folder / DESCRIPTION, change)


def config(change):
    return lambda folder: tiny.edit_json(folder / "config.json", change)


def section(**settings):
    """Change quantization_config."""
    return config(lambda c: c["quantization_config"].update(settings))


def group(part=None, **settings):
    """Change group_0, or its ``part``."""

    def change(c):
        found = c["quantization_config"]["config_groups"]["group_0"]
        (found if part is None else found[part]).update(settings)

    return config(change)


def scaled(name, by):
    return tensors(lambda t: t.update({name: (t[name] * by).astype(t[name].dtype)}))


def drop(name):
    return tensors(lambda t: t.pop(name))


def put(name, value):
    return tensors(lambda t: t.update({name: value}))


def remove(pattern):
    return lambda folder: [path.unlink() for path in folder.glob(pattern)]


def both(*steps):
    return lambda folder: [step(folder) for step in steps]


def cut(name):
    def run(folder):
        text = (folder / name).read_bytes()
        (folder / name).write_bytes(text[: len(text) // 2])

    return run


MODELSLIM = {
    "description cut off": ("w8a8", cut(DESCRIPTION), "not valid JSON"),
    "tensor not described": (
        "w8a8",
        described(lambda d: d.pop(DOWN + "weight_scale")),
        r"down_proj\.weight_scale",
    ),
    "entry of a norm gone": (
        "w8a8",
        described(lambda d: d.pop("model.norm.weight")),
        "says nothing.*model.norm",
    ),
    "described but absent": ("w8a8", drop(DOWN + "weight_scale"), r"no file.*down_proj\.weight_scale"),
    "layer of another model": (
        "w8a8",
        described(lambda d: d.update({"model.layers.7.mlp.up_proj.weight": "W8A8_DYNAMIC"})),
        "no file.*layers.7",
    ),
    "unknown type": ("w8a8", described(lambda d: d.update({Q + "weight": "W2A2"})), r"q_proj\.weight.*W2A2"),
    "types at odds": ("w8a8", described(lambda d: d.update({Q + "weight": "W8A16"})), "q_proj several types"),
    "weight of another shape": (
        "w8a8",
        put(Q + "weight", np.zeros((32, 30), np.int8)),
        r"q_proj.*\(32, 30\)",
    ),
    "weight of another dtype": (
        "w8a8",
        put(Q + "weight", np.zeros((32, 32), np.float32)),
        r"q_proj\.weight' is float32",
    ),
    "scale too short": (
        "w8a8",
        put(Q + "weight_scale", np.ones((31, 1), np.float32)),
        r"weight_scale.*\(31, 1\)",
    ),
    "offset too long": (
        "w8a8",
        put(Q + "weight_offset", np.zeros((33, 1), np.float32)),
        r"weight_offset.*\(33, 1\)",
    ),
    "negative scale": ("w8a8", scaled(Q + "weight_scale", -1), r"q_proj\.weight_scale.*negative"),
    "nan scale": ("w8a8", scaled(Q + "weight_scale", np.nan), r"q_proj\.weight_scale.*no numbers"),
    "asymmetric": ("w8a8", put(Q + "weight_offset", np.ones((32, 1), np.float32)), "weight_offset.*not zero"),
    "group size gone": (
        "w8a8-g16",
        described(lambda d: d.update(group_size=0)),
        r"weight_scale.*\(\d+, [23]\); .* asks for \(\d+, 1\)",
    ),
    "group size wrong": (
        "w8a8-g16",
        described(lambda d: d.update(group_size=8)),
        r"groups of 8, \(\d+, [46]\)",
    ),
    "group size no number": ("w8a8", described(lambda d: d.update(group_size="x")), "group_size is 'x'"),
    "sums of other weights": ("w4a8", scaled(DOWN + "scale_bias", 3), "scale_bias.*other ones"),
    "sums not described": (
        "w4a8",
        both(described(lambda d: d.pop(Q + "scale_bias")), drop(Q + "scale_bias")),
        "needs scale_bias",
    ),
    "second scale alone": (
        "w4a8-g8",
        both(described(lambda d: d.pop(Q + "weight_offset_second")), drop(Q + "weight_offset_second")),
        "weight_offset_second",
    ),
    "bias of other weights": ("w8a8-static", scaled(Q + "quant_bias", 5), "quant_bias.*does not follow"),
    "product of other scales": ("w8a8-static", scaled(Q + "deq_scale", 2), "deq_scale"),
    "input scale of zero": ("w8a8-static", scaled(Q + "input_scale", 0), "input_scale' is 0"),
    "offset of a symmetric input": (
        "w8a8-static",
        put(Q + "input_offset", np.full(1, 3, np.float32)),
        "input_offset' is 3.*symmetric",
    ),
    "attention arithmetic": (
        "w8a8",
        described(lambda d: d.update(fa_quant_type="FAKQuant")),
        "fa_quant_type",
    ),
    "cache of another kind": ("w8a8", described(lambda d: d.update(kv_cache_type="C4")), "kv_cache_type.*C4"),
    "online rotation": (
        "w8a8",
        put("model.layers.0.mlp.kronecker_rotation_m", np.eye(4, dtype=np.float32)),
        "kronecker_rotation_m.*while the model",
    ),
    "shard missing": ("w8a8", remove("quant_model_weights-*.safetensors"), "lacks quant_model_weights-00001"),
    "all weights missing": ("w8a8", remove("quant_model_weights*"), "no safetensors weights"),
    "rotation missing": ("w8a8", remove("optional/quarot.safetensors"), "names the rotation"),
    "cache scale missing": (
        "w8a8",
        both(
            described(lambda d: d.pop("model.layers.1.self_attn.k_proj.kv_cache_scale")),
            drop("model.layers.1.self_attn.k_proj.kv_cache_scale"),
        ),
        r"layers\.1\.self_attn\.k_proj\.kv_cache_scale",
    ),
    "cache scale too short": (
        "w8a8",
        put("model.layers.1.self_attn.v_proj.kv_cache_scale", np.ones(15, np.float32)),
        r"v_proj\.kv_cache_scale.*\(15,\).*\(16,\)",
    ),
    "cache offset": (
        "w8a8",
        put("model.layers.1.self_attn.v_proj.kv_cache_offset", np.ones(16, np.float32)),
        "kv_cache_offset.*not zero",
    ),
}
COMPRESSED = {
    "scale missing": ("w8a8", drop(Q + "weight_scale"), r"lack.*q_proj\.weight_scale"),
    "scale too short": (
        "w8a8",
        put(Q + "weight_scale", np.ones((31, 1), np.float32)),
        r"\(31, 1\); it should be \(32, 1\)",
    ),
    "scale of groups missing": (
        "w8a8-g16",
        put(Q + "weight_scale", np.ones((32, 1), np.float32)),
        r"it should be \(32, 2\)",
    ),
    "not quantised": (
        "w8a8",
        put(Q + "weight", np.ones((32, 32), np.float32)),
        r"q_proj\.weight' is float32",
    ),
    "ignored yet quantised": ("w8a8", section(ignore=["lm_head", Q[:-1]]), r"leaves .*q_proj unquantised"),
    "quantised yet plain": ("w8a8", section(ignore=[]), r"quantises lm_head.*lm_head\.weight_scale"),
    "ignores what is not there": ("w8a8", section(ignore=["lm_head", "vision"]), "ignores vision"),
    "shape told wrongly": (
        "w4a16",
        put(Q + "weight_shape", np.array([32, 40])),
        r"weight_packed.*\(32, 4\).*\(32, 5\)",
    ),
    "another model's shape": (
        "w4a16",
        both(
            put(Q + "weight_shape", np.array([32, 8])), put(Q + "weight_packed", np.zeros((32, 1), np.int32))
        ),
        r"q_proj\.weight.*\(32, 8\)",
    ),
    "zero points": (
        "w4a16",
        put(Q + "weight_zero_point", np.zeros((4, 1), np.int32)),
        "weight_zero_point.*no place",
    ),
    "stray tensor": ("w8a8", put("model.layers.0.extra", np.zeros(1, np.float32)), "no use for.*extra"),
    "packed said to be plain": ("w4a16", group(format="int-quantized"), r"lack .*weight"),
    "format unknown": ("w8a8", group(format="marlin-24"), "format 'marlin-24'"),
    "bits": ("w8a8", group("weights", num_bits=3), "3 bits"),
    "floats": ("w8a8", group("weights", type="float"), "type 'float'"),
    "asymmetric": ("w8a8", group("weights", symmetric=False), "symmetric False"),
    "strategy": ("w8a8", group("weights", strategy="tensor"), "strategy 'tensor'"),
    "order of activations": ("w8a8", group("weights", actorder="group"), "actorder"),
    "group size": ("w8a8-g16", group("weights", group_size=None), "group_size is None"),
    "groups do not divide": ("w8a8-g16", group("weights", group_size=5), "groups of 5 do not divide"),
    "activations of 4 bits": ("w8a8", group("input_activations", num_bits=4), "int of 8 bits"),
    "outputs": ("w8a8", group(output_activations={"num_bits": 8}), "quantises outputs"),
    "targets": ("w8a8", group(targets="Linear"), "targets is 'Linear'"),
    "no groups": ("w8a8", section(config_groups={}), "no config_groups"),
    "status": ("w8a8", section(quantization_status="frosty"), "quantization_status is 'frosty'"),
    "cache": ("w8a8", section(kv_cache_scheme={"num_bits": 8}), "kv_cache_scheme"),
    "input scale": ("w8a8-static", scaled(Q + "input_scale", -1), "input_scale' is -"),
    "zero point gone": ("w8a8-static-offset", drop(Q + "input_zero_point"), "input_zero_point"),
    "too large for 4 bits": ("w4a8", put(Q + "weight", np.full((32, 32), 9, np.int8)), r"outside \[-8, 7\]"),
    "shard missing": ("w8a8", remove("model-*.safetensors"), "lacks model-00001"),
    "another method": ("w8a8", section(quant_method="awq"), "quantised by 'awq'"),
}


def marker(**settings):
    return config(lambda c: c["eaglejax"].update(settings))


def weight(path, **settings):
    return config(lambda c: c["eaglejax"]["weights"][path].update(settings))


def hashed(pattern):
    """The hashes of the files that match, and of no others."""
    from eaglejax.checkpoint.quantized.own.marker import file_hash

    return lambda folder: marker(files={path.name: file_hash(path) for path in folder.glob(pattern)})(folder)


def rehashed(step):
    """A change of tensors that the hashes of the folder agree with."""
    return both(step, hashed("*.safetensors"))


QUANT = "layers.0.q"
OWN = {
    "file changed": ("w8a8", scaled("layers.0.q.scale", 2), "was changed or damaged.*SHA-256"),
    "config cut off": ("w8a8", cut("config.json"), "not valid JSON"),
    "entry missing": (
        "w8a8",
        config(lambda c: c["eaglejax"].pop("weights")),
        "lacks weights; it is truncated",
    ),
    "no object": ("w8a8", config(lambda c: c.update(eaglejax=3)), "eaglejax must be an object"),
    "newer version": ("w8a8", marker(version=9), "version is 9"),
    "no files": ("w8a8", marker(files={}), "must name the weight files"),
    "shard missing": ("w8a8", remove("model-*.safetensors"), "lacks model-00001"),
    "kind unknown": ("w8a8", weight(QUANT, type="nf4"), "nf4.*known are quantized"),
    "field missing": (
        "w8a8",
        config(lambda c: c["eaglejax"]["weights"][QUANT].pop("bits")),
        r"layers\.0\.q is described by",
    ),
    "bits": ("w8a8", weight(QUANT, bits=5), r"bits of layers\.0\.q is 5"),
    "bits of other values": ("w8a8", weight(QUANT, bits=4), r"layers\.0\.q has shape \(64, 32\)"),
    "activation": ("w8a8", weight(QUANT, activation="maybe"), "activation of layers.0.q is 'maybe'"),
    "static without a scale": ("w8a8", weight(QUANT, activation="static"), "needs input_scale"),
    "leaf unknown": (
        "w8a8",
        config(lambda c: c["eaglejax"]["weights"].update({"layers.9.q": {}})),
        "layers.9.q, which the model",
    ),
    "array missing": ("w8a8", rehashed(drop("layers.0.q.scale")), r"array 'layers\.0\.q\.scale'"),
    "array too many": (
        "w8a8",
        rehashed(put("layers.9.q", np.zeros(1, np.int8))),
        "does not describe: layers.9.q",
    ),
    "scale too short": ("w8a8", rehashed(put("layers.0.q.scale", np.ones(31, np.float32))), r"\(31,\)"),
    "scale of another dtype": ("w8a8", rehashed(put("layers.0.q.scale", np.ones(32))), "scale is float64"),
    "norm of another size": (
        "w8a8",
        rehashed(put("norm", np.ones(31, np.float32))),
        r"norm has shape \(31,\)",
    ),
    "cache scales missing": ("w8a8", rehashed(drop("cache.k.1")), r"lack cache\.k\.1"),
    "cache scales of another size": (
        "w8a8",
        rehashed(put("cache.k.1", np.ones((2, 7), np.float32))),
        r"cache\.k\.1 has shape \(2, 7\)",
    ),
    "cache format": ("w8a8", marker(cache="int3"), "cache is 'int3'"),
    "cache of a seed alone": ("w8a8", marker(cache={"seed": 3}), r"cache is \{'seed': 3\}"),
    "seed of a cache without a rotation": (
        "w8a8",
        marker(cache={"format": "int8", "seed": 3}),
        "draws no rotation",
    ),
    "a file without a hash": ("w8a8", hashed("*.index.json"), "files leaves out model-00001"),
    "flag of the model": ("w8a8", marker(model={"fast": True}), "it can set qk_rotation"),
    "another basis": ("w8a8", marker(basis="0" * 32), "says basis '0000"),
    "rotation missing": ("w8a8", remove("optional/quarot.safetensors"), "holds no rotation"),
}


DAMAGES = {
    (form, case): damage
    for form, damages in (("modelslim", MODELSLIM), ("compressed-tensors", COMPRESSED), ("eaglejax", OWN))
    for case, damage in damages.items()
}
