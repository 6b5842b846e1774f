"""Spellings of rotary kinds in published configs."""

from __future__ import annotations

import pytest

from eaglejax.errors import ConfigError
from eaglejax.nn import rope


@pytest.mark.parametrize(
    ("scaling", "kind"),
    [
        ({"type": "mrope", "mrope_section": [16, 24, 24], "rope_type": "default"}, "default"),
        ({"type": "mrope", "mrope_section": [16, 24, 24]}, "default"),
        ({"rope_type": "YaRN", "factor": 4.0, "original_max_position_embeddings": 512}, "yarn"),
        ({"type": "su", "short_factor": [1.0, 2.0], "long_factor": [2.0, 3.0]}, "longrope"),
    ],
)
def test_other_names_of_a_kind(scaling, kind):
    assert rope.from_hf({"rope_scaling": scaling}).kind == kind


def test_a_multimodal_rotation_takes_no_factor():
    with pytest.raises(ConfigError, match="factor"):
        rope.from_hf({"rope_scaling": {"type": "mrope", "factor": 2.0}})
