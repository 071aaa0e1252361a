"""The journal of a run: what is finished, on the disk, so that a run that was killed can go on.

`.NAME.journal` beside the destination NAME holds
  run.json             what run it is: model, data, recipe, options, versions
  prelude.json         what was computed before the layers, if anything
  layer-N.json         the report of finished layer N, written when all else of the layer is there
  hidden-N-*           what enters layer N, for the newest N only, see `quantkit.calibrate.moving`
  piece-*, shard-*     the tensors of finished layers, see `quantkit.shards.ShardWriter`
Each file appears complete or not at all. The journal goes when the run has succeeded, and when it
has failed in a way that would only repeat itself.
"""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from quantkit.calibrate.interrupts import InterruptWatch
from quantkit.calibrate.moving import Moving
from quantkit.calibrate.plan import Plan
from quantkit.calibrate.ranks import LostProcessError
from quantkit.calibrate.records import differences, from_json
from quantkit.calibrate.report import KEEP, LayerReport, ModuleReport, Report
from quantkit.errors import CheckpointError
from quantkit.shards import read_json
from quantkit.staging import MARKER, beside, staged_file, sync_folder

logger = logging.getLogger("quantkit")

RUN, PRELUDE = "run.json", "prelude.json"
SHOWN_DIFFERENCES = 4
HASHES = {
    "source.fingerprint": "the model's weights",
    "config": "the model's config.json",
    "data.sha256": "the calibration tokens",
}
"""What the hashes among a run's values stand for; their digits tell nobody anything."""


class Interrupted(KeyboardInterrupt):
    """Ctrl-C in a run that can be resumed; the message says how."""


class Journal:
    """Context manager around the layers of a run, inside the lock on its destination.

    `run` is the run's fingerprint: JSON whose every value a resumed run must repeat. With `resume`
    an unfinished run of the same destination is taken up: `layers`, `prelude` and `num_pieces` are
    what it had finished. Else it is discarded, and a log line says so. `keeps_last` keeps the
    outputs of the last layer too, for what comes after it.

    Raises CheckpointError, and leaves the journal alone, if the unfinished run was another or its
    files are damaged. Ctrl-C becomes `Interrupted` once a layer is finished.
    """

    def __init__(
        self,
        destination: Path,
        run: Mapping[str, Any],
        num_layers: int,
        resume: bool,
        keeps_last: bool = False,
    ) -> None:
        self.destination = destination.absolute()
        self.folder = beside(self.destination, "journal")
        self.layers: list[LayerReport] = []
        self.prelude: Any = None
        self.num_pieces = 0
        self._run = _as_json(run)
        self._num_layers = num_layers
        self.num_kept = num_layers + keeps_last  # from here on no hidden states are kept
        self._resume = resume
        self._interrupts = InterruptWatch()

    def __enter__(self) -> Journal:
        self._open()
        self._interrupts.__enter__()
        return self

    def _open(self) -> None:
        found = (self.folder / RUN).exists()
        if found and self._resume:
            self._take_up()
            return
        if found:
            logger.warning(
                "an unfinished run of %s, %d layers far, is discarded; --resume would continue it",
                self.destination,
                self._num_recorded(),
            )
        elif self._resume:
            logger.info("no unfinished run of %s: starting with layer 1", self.destination)
        self._remove()
        self.folder.mkdir()
        self._write(RUN, self._run)
        sync_folder(self.folder.parent)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._interrupts.__exit__(kind, error, trace)
        if error is not None and self._interrupts.seen:
            error = KeyboardInterrupt()  # whatever a library made of it
        finished = self._num_recorded()
        if not (finished and error is not None and _may_pass(error)):
            self._remove()
            if self._interrupts.seen and isinstance(error, KeyboardInterrupt):
                raise error
            return
        done = f"{finished} of {self._num_layers} layers"
        if isinstance(error, KeyboardInterrupt):
            raise Interrupted(
                f"interrupted after {done}; the same command with --resume continues"
            ) from error
        logger.warning(
            "%s are kept in %s; the same command with --resume continues", done, self.folder
        )

    def set_prelude(self, value: Any) -> None:
        """Record what was computed before the layers: any JSON value but null."""
        self.prelude = _as_json(value)
        self._write(PRELUDE, {"prelude": self.prelude})
        sync_folder(self.folder)

    def add(self, report: LayerReport, moving: Moving, num_pieces: int) -> None:
        """Record the next layer as finished: its tensors are in the first `num_pieces` pieces.

        `moving` has passed the layer.
        """
        number = len(self.layers)
        if moving and number + 1 < self.num_kept:
            moving.save(self.folder, number + 1)
        self._write(f"layer-{number:05d}.json", {"pieces": num_pieces, "report": asdict(report)})
        sync_folder(self.folder)
        Moving.forget(self.folder, number + 1)
        self.layers.append(report)
        self.num_pieces = num_pieces

    def restore(self, moving: Moving) -> None:
        """Put what enters the first unfinished layer into batches at the door of layer 0."""
        if self.layers and moving and len(self.layers) != self.num_kept:
            moving.restore(self.folder, len(self.layers))

    def _take_up(self) -> None:
        """Read what the unfinished run left."""
        try:
            changes = differences(read_json(self.folder / RUN), self._run, HASHES)
            if (self.folder / PRELUDE).exists():
                self.prelude = read_json(self.folder / PRELUDE)["prelude"]
            self._read_layers()
        except (CheckpointError, LookupError, TypeError, ValueError) as error:
            raise CheckpointError(
                f"{self.folder} is damaged ({error}); run without --resume to start over"
            ) from None
        if changes:
            more = len(changes) - SHOWN_DIFFERENCES
            shown = [*changes[:SHOWN_DIFFERENCES], *([f"and {more} more"] if more > 0 else [])]
            raise CheckpointError(
                f"the unfinished run of {self.destination} was another one: {'; '.join(shown)}; "
                "repeat it as it was, or run without --resume to start over"
            )
        done = len(self.layers)
        logger.info("continuing after %d of %d layers", done, self._num_layers)

    def _read_layers(self) -> None:
        while (path := self.folder / f"layer-{len(self.layers):05d}.json").exists():
            record = read_json(path)
            self.layers.append(from_json(LayerReport, record["report"]))
            self.num_pieces = int(record["pieces"])

    def _num_recorded(self) -> int:
        """Count on the disk: Ctrl-C may come just after a layer's record."""
        return len(list(self.folder.glob("layer-*.json")))

    def _remove(self) -> None:
        # First what makes it a journal: a kill must not leave half of one.
        with suppress(FileNotFoundError):
            (self.folder / RUN).unlink()
        shutil.rmtree(self.folder, ignore_errors=True)

    def _write(self, name: str, value: Any) -> None:
        with staged_file(self.folder / name) as file:
            file.write(json.dumps(value, indent=1).encode())

    @staticmethod
    def size(destination: Path) -> int:
        """Return the bytes that the journal of an unfinished run takes, if there is one."""
        folder = beside(destination.absolute(), "journal")
        if not (folder / RUN).exists():
            return 0
        return sum(path.stat().st_size for path in folder.glob("*"))


@dataclass(slots=True)
class RecordedReport(Report):
    """The report of a run that was finished before; its JSON is what the folder holds."""

    recorded: dict[str, Any] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """Return the contents of quantkit.json."""
        return self.recorded


def finished_report(destination: Path, plan: Plan, provenance: Mapping[str, Any]) -> Report | None:
    """Return the report of the result at `destination` if the same run made it, else None.

    So a run that was killed after its last step can be resumed too: what is left of its journal
    goes.
    """
    try:
        recorded = read_json(destination / MARKER)
        layers = [from_json(LayerReport, layer) for layer in recorded["layers"]]
        kept = {m.name for layer in layers for m in layer.modules if KEEP in m.tiers}
        outside = [from_json(ModuleReport, module) for module in recorded["outside_layers"]]
        made = replace(plan.keeping(kept), target_bytes=int(recorded["target_bytes"]))
    except (CheckpointError, LookupError, TypeError, ValueError):
        return None
    if any(recorded.get(key) != value for key, value in _as_json(provenance).items()):
        return None
    logger.info("%s is finished: there is nothing to resume", destination)
    shutil.rmtree(beside(destination.absolute(), "journal"), ignore_errors=True)
    return RecordedReport(
        made, destination, layers, recorded["warnings"], outside=outside, recorded=recorded
    )


def _may_pass(error: BaseException) -> bool:
    """Tell whether the same run may succeed another time: the disk was full, memory was short."""
    passing = (
        KeyboardInterrupt,
        OSError,
        LostProcessError,
        MemoryError,
        torch.OutOfMemoryError,
        torch.AcceleratorError,
    )
    return isinstance(error, passing) or isinstance(error.__cause__, OSError)


def _as_json(value: Any) -> Any:
    """Return a value as it will be read back."""
    return json.loads(json.dumps(value))
