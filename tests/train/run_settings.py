"""Settings of a small run."""

from eaglejax.train.objective import Objective
from eaglejax.train.settings import (
    DataSettings,
    DraftSettings,
    OptimizerSettings,
    RunSettings,
    SourceFile,
    TrainSettings,
)


def settings_for(folder, rows_file, out, **run):
    return TrainSettings(
        target=folder,
        target_dtype="float32",
        out=str(out),
        data=DataSettings(train=(SourceFile(str(rows_file)),), row_tokens=64, overlap=8, validation=0.2),
        draft=DraftSettings(aux=(2, 3, 4), vocab=64, intermediate_size=24),
        objective=Objective(steps=2, out_of_vocabulary="keep"),
        optimizer=OptimizerSettings(learning_rate=1e-2, warmup=2),
        run=RunSettings(
            **{
                "updates": 7,
                "rows": 2,
                "compute_dtype": "float32",
                "save_every": 5,
                "evaluate_every": 5,
                "log_every": 2,
                "decode_prompts": 2,
                "decode_tokens": 12,
                "decode_depth": 2,
            }
            | run
        ),
    )
