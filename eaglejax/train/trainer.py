"""The training loop: updates, evaluations, checkpoints and logs of one run, resumable at any update."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import math
import os
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from eaglejax.checkpoint.files import make_folder, only_writer, write_text
from eaglejax.drafts.tree import chain
from eaglejax.errors import ConfigError, EaglejaxError
from eaglejax.identity import described
from eaglejax.models.target import Target
from eaglejax.train import evaluate, run_checkpoints
from eaglejax.train.batch import Batch
from eaglejax.train.family import Draft, Weights
from eaglejax.train.feature_cache import FeatureCache
from eaglejax.train.features import fingerprint, identity, with_features
from eaglejax.train.logs import SCALARS, JsonLog, Log, TensorBoardLog, WandbLog
from eaglejax.train.optimizers import optimizer, schedule
from eaglejax.train.packing import Features, batch_stream
from eaglejax.train.prepare import Data, check_run
from eaglejax.train.registry import training_of
from eaglejax.train.samples import Sample
from eaglejax.train.settings import STARTS, TrainSettings, to_toml
from eaglejax.train.state import (
    TrainState,
    UpdateReport,
    data_mesh,
    init_state,
    make_update,
    micro_batches,
    replicate,
    shard_batch,
)
from eaglejax.train.sweep import draft_digest


@dataclasses.dataclass(frozen=True)
class Result:
    """How a run ended. ``draft``: folder of the exported draft, None when it was interrupted. ``score``: the
    best evaluation's tau."""

    updates: int
    interrupted: bool
    draft: Path | None
    score: float | None


class Trainer:
    """One run over prepared data and a prepared draft.

    ``notify`` is told of every logged update, for a progress display. The run's folder gets ``config.toml``,
    ``checkpoints/``, ``metrics.jsonl``, ``tensorboard/`` and, at the end, ``draft/``.
    """

    def __init__(
        self,
        settings: TrainSettings,
        target: Target,
        data: Data,
        draft: Draft,
        notify: Callable[[int, dict[str, Any]], None] = lambda update, values: None,
    ) -> None:
        settings.check()
        self.settings, self.target, self.data, self.draft, self.notify = settings, target, data, draft, notify
        self.out = Path(settings.out)
        self.mesh = data_mesh()
        run = settings.run
        if run.rows % self.mesh.size:
            raise ConfigError(f"run.rows {run.rows} must be a multiple of the {self.mesh.size} devices")
        check_run(settings, data)
        if self.mesh.size > 1:
            # Weights on one device would be copied to the others for every batch.
            self.target = dataclasses.replace(target, params=replicate(target.params, self.mesh))
        self._taps = training_of(draft.config).taps(draft.config)
        self._features = self._open_features()
        dtype = jnp.dtype(run.compute_dtype)
        frozen = replicate(draft.frozen, self.mesh)
        head = replicate(draft.head, self.mesh)
        self._transform = optimizer(settings.optimizer, run.updates)
        self._update = make_update(
            draft.config,
            settings.objective,
            self._transform,
            frozen,
            head,
            compute_dtype=dtype,
            seed=run.seed,
            remat=run.remat,
            mesh=self.mesh,
        )
        self._measure = evaluate.make_evaluation(
            draft.config,
            settings.objective,
            frozen,
            head,
            compute_dtype=dtype,
            remat=run.remat,
            mesh=self.mesh,
        )
        self._rate = schedule(settings.optimizer, run.updates)
        self._stop = threading.Event()

    def run(self) -> Result:
        """Train from the latest checkpoint, or from the start, to the last update.

        SIGTERM and SIGINT end the run after the update in work, with a checkpoint. Raises EaglejaxError when
        too many updates in a row could not be applied, and CheckpointError while another process writes to
        the same folder.
        """
        with only_writer(self.out):
            make_folder(self.out)
            return self._run()

    def _run(self) -> Result:
        checkpoints = run_checkpoints.RunCheckpoints(
            self.out / "checkpoints", self._binds(), self.settings.run.keep
        )
        state = replicate(init_state(self.draft.weights, self._transform), self.mesh)
        stream = self._stream()
        if checkpoints.latest is not None:
            restored = checkpoints.restore(state)
            state = restored.state
            stream.set_state(restored.data)
        write_text(self.out / "config.toml", to_toml(self.settings))
        logs = self._open_logs()
        try:
            with self._signals():
                state = self._loop(state, stream, checkpoints, logs)
        finally:
            for log in logs:
                log.close()
        interrupted = int(state.update) < self.settings.run.updates
        best = checkpoints.best
        folder = None if interrupted else self._export(checkpoints, state)
        return Result(int(state.update), interrupted, folder, None if best is None else best[1])

    def _loop(
        self, state: TrainState, stream: Any, checkpoints: run_checkpoints.RunCheckpoints, logs: list[Log]
    ) -> TrainState:
        run = self.settings.run
        validation = self._held_out()
        update, streak, tokens, since = int(state.update), 0, 0, time.perf_counter()
        reports: list[UpdateReport] = []
        while update < run.updates and not self._stop.is_set():
            batches = [next(stream) for _ in range(run.accumulate)]
            tokens += sum(int(np.sum(b.documents > 0)) for b in batches)
            state, report = self._update(state, self._place(batches))
            update += 1
            reports.append(report)
            streak = 0 if bool(report.applied) else streak + 1
            if streak >= run.most_skipped:
                checkpoints.save(state, stream.get_state())
                raise EaglejaxError(
                    f"{streak} updates in a row had a loss or gradient that is not finite, or nothing to "
                    "train on "
                    f"(up to update {update}); the features or the learning rate are at fault"
                )
            if update % run.log_every == 0 or update == run.updates:
                now = time.perf_counter()
                values = self._values(update, reports, state) | {"tokens_per_second": tokens / (now - since)}
                self._log(logs, update, values)
                reports, tokens, since = [], 0, now
            score = None
            if validation and (update % run.evaluate_every == 0 or update == run.updates):
                begin = time.perf_counter()
                values = self._evaluate(state.weights, validation)
                score = values.get("decoded/tau", values["validation/tau_simulated"])
                self._log(logs, update, values)
                since += time.perf_counter() - begin
            if score is not None or update % run.save_every == 0 or update == run.updates:
                begin = time.perf_counter()
                checkpoints.save(state, stream.get_state(), score=score)
                since += time.perf_counter() - begin
        if self._stop.is_set():
            checkpoints.save(state, stream.get_state())
        return state

    def _values(self, update: int, reports: list[UpdateReport], state: TrainState) -> dict[str, Any]:
        values: dict[str, Any] = {}
        # What a skipped update computed is not finite, and would make the others' sums so.
        if applied := [r for r in reports if bool(r.applied)]:
            metrics = evaluate.summary(evaluate.add_up(r.metrics for r in applied))
            values = {f"train/{name}": value for name, value in metrics.items()}
            values["train/objective"] = math.fsum(float(r.loss) for r in applied) / len(applied)
            values["gradient_norm"] = math.fsum(float(r.gradient_norm) for r in applied) / len(applied)
        return {
            **values,
            "learning_rate": float(self._rate(update - 1)),
            "skipped_updates": int(state.skipped),
            "discarded_documents": int(state.discarded),
        }

    def _evaluate(self, weights: Weights, validation: evaluate.HeldOut) -> dict[str, Any]:
        found = evaluate.summary(
            evaluate.add_up(self._measure(weights, shard_batch(b, self.mesh)) for b in validation)
        )
        values = {f"validation/{name}": value for name, value in found.items()}
        run = self.settings.run
        if run.decode_prompts:
            prompts = self.data.prompts[: run.decode_prompts]
            stats = evaluate.decode(
                self.target,
                self.draft.config,
                self.draft.complete(weights),
                self.draft.ids,
                prompts,
                tokens=run.decode_tokens,
                tree=chain(run.decode_depth),
            )
            values |= {f"decoded/{n}": v for n, v in evaluate.decoded_summary(stats).items()}
        return values

    def _log(self, logs: list[Log], update: int, values: dict[str, Any]) -> None:
        for log in logs:
            log.write(update, values)
        self.notify(update, values)

    def _export(self, checkpoints: run_checkpoints.RunCheckpoints, state: TrainState) -> Path:
        """The best checkpoint (the last one where nothing was evaluated) as a draft that ``load_draft``
        reads."""
        best = checkpoints.best
        if best is not None and best[0] != int(state.update):
            state = checkpoints.restore(state, best[0]).state
        return export(self.out / "draft", self.draft, state.weights, self.settings, dtype=self.target.dtype)

    def _open_features(self) -> Callable[[Sample], Features] | None:
        """How a sample's features are read, or None when they are computed on the way."""
        where = self.settings.run.features
        if where == "online":
            return None
        cache = FeatureCache(where, identity(self.target, self._taps))
        missing = [s for s in (*self.data.train, *self.data.validation) if s not in cache]
        if missing:
            raise ConfigError(
                f"{where} lacks the features of {len(missing)} samples (first: {missing[0].name}); run "
                "`eaglejax "
                "features` with the same settings"
            )
        return cache.read

    def _stream(self) -> Any:
        data, run = self.settings.data, self.settings.run
        return batch_stream(
            self.data.train,
            capacity=data.row_tokens,
            rows=run.rows,
            seed=data.seed,
            features=self._features,
        )

    def _place(self, batches: list[Batch]) -> Batch:
        """Micro-batches on the devices, rows spread over them, with features."""
        if self._features is None:
            batches = [self._with_features(b) for b in batches]
        return shard_batch(micro_batches(batches), self.mesh, leading=1)

    def _with_features(self, batch: Batch) -> Batch:
        """One batch on the devices, with features unless it was made of stored ones."""
        batch = shard_batch(batch, self.mesh)
        return with_features(self.target, batch, self._taps) if self._features is None else batch

    def _held_out(self) -> evaluate.HeldOut:
        return evaluate.HeldOut(
            self.data.validation,
            capacity=self.settings.data.row_tokens,
            rows=self.settings.run.rows,
            features=self._features,
            place=self._with_features,
        )

    def _binds(self) -> dict[str, Any]:
        """What a checkpoint must agree with: all that shapes the state or the order of the data, and how the
        best one is told."""
        vocab, run, start = self.draft.vocab, self.settings.run, self.settings.draft.start
        decoded = [run.decode_prompts, run.decode_tokens, run.decode_depth]
        return {
            "target": fingerprint(self.target),
            "start": start if start in STARTS else draft_digest(start),
            "train_head": self.settings.draft.train_head,
            "compute_dtype": run.compute_dtype,
            "score": decoded if run.decode_prompts else "simulated",
            "draft": described(self.draft.config),
            "vocabulary": None if vocab is None else vocab.key,
            "objective": described(self.settings.objective),
            "optimizer": described(self.settings.optimizer),
            "updates": run.updates,
            "rows": run.rows,
            "accumulate": run.accumulate,
            "seed": run.seed,
            "data": [self.settings.data.row_tokens, self.settings.data.seed, _data_hash(self.data.train)],
        }

    def _open_logs(self) -> list[Log]:
        run = self.settings.run
        logs: list[Log] = [JsonLog(self.out / SCALARS)]
        if run.tensorboard:
            logs.append(TensorBoardLog(self.out / "tensorboard"))
        if run.wandb:
            logs.append(WandbLog(self.out, dataclasses.asdict(self.settings)))
        return logs

    @contextlib.contextmanager
    def _signals(self) -> Iterator[None]:
        """SIGTERM and SIGINT ask for a stop; outside the main thread, where they cannot be caught, nothing
        is."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        old = {s: signal.signal(s, lambda *_: self._stop.set()) for s in (signal.SIGTERM, signal.SIGINT)}
        try:
            yield
        finally:
            for number, handler in old.items():
                signal.signal(number, handler)


def export(folder: Path, draft: Draft, weights: Weights, settings: TrainSettings, *, dtype: Any) -> Path:
    """Write a trained draft for ``load_draft``; an earlier one is replaced.

    In the project's own form, which holds every draft (``eaglejax convert`` writes the others').
    """
    # Names that the next run finds again: a kill leaves nothing for good.
    temporary = folder.with_name(f".{folder.name}.part")
    shutil.rmtree(temporary, ignore_errors=True)
    complete = draft.complete(weights)
    training_of(draft.config).write(temporary, draft.config, complete, draft.ids, dtype=dtype)
    write_text(temporary / "training.toml", to_toml(settings))
    earlier = folder.with_name(f".{folder.name}.earlier")
    shutil.rmtree(earlier, ignore_errors=True)
    if folder.exists():
        os.replace(folder, earlier)
    os.replace(temporary, folder)
    shutil.rmtree(earlier, ignore_errors=True)
    return folder


def _data_hash(samples: list[Sample]) -> str:
    return hashlib.sha256("".join(s.key for s in samples).encode()).hexdigest()[:32]
