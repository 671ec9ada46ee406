"""Calibration's measurements: quantize with one group of tensors low, measure the divergence.

Composes the engine's tools and ``quality`` for ``plan.probe``, which may not know them.
"""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import Mapping
from pathlib import Path

from browndwarf.cli.render import Output
from browndwarf.engine.locate import Build
from browndwarf.engine.quantizer import quantize
from browndwarf.files import cache_folder, storage_errors
from browndwarf.models.gguf import fingerprint
from browndwarf.plan import probe
from browndwarf.plan.calibration import Text, default_text, read_texts
from browndwarf.plan.inputs import type_lines
from browndwarf.plan.loss import ErrorTable
from browndwarf.plan.planner import Material
from browndwarf.plan.probe import Calibration, Divergence
from browndwarf.quality.divergence import measure_kld
from browndwarf.quality.perplexity import Run
from browndwarf.units import parse_duration

REST = "Q8_0"
"""The type of all that is not probed: llama-quantize ignores single types under F16."""
CTX = 512
CHUNKS = 24
"""Half of each chunk is scored: some 6,000 tokens, a few percent of error per group."""


def calibration(
    out: Output,
    material: Material,
    table: ErrorTable,
    build: Build,
    *,
    text: Path | None,
    budget: str,
) -> Calibration:
    """Measure the groups' alphas, or take what was measured before.

    Raises:
        UsageError: the text is too short.
        DiskFull, ToolFailed and others: as quantizing and measuring.
    """
    model = material.model
    words = read_texts([text]) if text is not None else default_text(model)
    run = Run(ctx=CTX, chunks=CHUNKS)
    place = _place(material, words, run)
    with storage_errors(place.parent, "make a folder for calibration"):
        place.parent.mkdir(parents=True, exist_ok=True)
    # Not the system's folder for temporary files: that is often small, and these are models.
    with tempfile.TemporaryDirectory(prefix="probe-", dir=place.parent) as name:
        folder = Path(name)
        source = folder / words.file_name
        source.write_bytes(words.data)

        def measure(types: Mapping[str, str]) -> Divergence:
            target = folder / "probe.gguf"
            quantize(
                build,
                model.path,
                target,
                REST,
                allow_requantize=True,
                imatrix=material.imatrix,
                tensor_type_file=types_file(folder, types),
                overwrite=True,
            )
            found = measure_kld(build, target, model.path, source, run)
            target.unlink()
            return Divergence(mean=found.mean, error=found.error)

        found = probe.calibrate(
            material,
            table,
            measure,
            budget_s=parse_duration(budget),
            kept=probe.load(place),
            on_group=lambda group, at, of: out.note(f"calibrating {group} ({at} of {of})"),
            save=lambda so_far: probe.keep(place, so_far),
        )
    probe.keep(place, found)
    return found


def types_file(folder: Path, types: Mapping[str, str]) -> Path | None:
    """The types of single tensors as llama-quantize reads them; None without any."""
    if not types:
        return None
    path = folder / "types.txt"
    path.write_text(type_lines(types), encoding="utf-8")
    return path


def _place(material: Material, words: Text, run: Run) -> Path:
    key = "|".join(
        (
            fingerprint(material.model.path),
            material.imatrix_sha or "",
            words.sha256,
            f"{run.ctx}x{run.chunks}",
            REST,
            ",".join(probe.LOW_TYPES),
            material.engine_sha,
        )
    )
    folder = cache_folder("alphas")
    return folder / f"{hashlib.sha256(key.encode()).hexdigest()[:24]}.json"
