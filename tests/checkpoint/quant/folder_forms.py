"""The forms of a quantised folder, and a target written in one."""

import packed_targets as tiny

from eaglejax.checkpoint.quantized.write import write_quantized

FORMS = ("eaglejax", "modelslim", "compressed-tensors")


def write(target, folder, form, **options):
    write_quantized(target, folder, form=form, config=tiny.raw_config(target.config.family), **options)
    return folder
