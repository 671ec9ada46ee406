"""Findings are checked against cells; what was not measured says which axis to add."""

from __future__ import annotations

from typing import Any

from browndwarf.records import Acceptance, CellRecord, Prediction, Rate
from browndwarf.sweep.laws import Law, check
from browndwarf.sweep.space import Configuration

BASE = Configuration(target_type="Q4_0")


def cell(
    rate: float,
    *,
    workload: str = "prose",
    accepted: float = 0.6,
    mib: float = 0.0,
    marks: tuple[str, ...] = (),
    predicted: bool = False,
    synthetic: bool = False,
    **settings: Any,
) -> CellRecord:
    configuration = Configuration(target_type="Q4_0", **settings)
    made = Prediction(decode_tok_s=rate, low=rate, high=rate)
    return CellRecord(
        id=f"{configuration.key()}.{workload}",
        status="predicted" if predicted else "ok",
        options=configuration.as_dict(),
        target_type="Q4_0",
        head_type=configuration.head_type,
        n_max=configuration.n_max,
        workload=workload,
        decode_tok_s=None if predicted else Rate(mean=rate, spread=0.0, runs=(rate, rate)),
        predicted=made if predicted else None,
        acceptance=Acceptance(rate=accepted, per_position=(accepted,), drafted=9, accepted=5)
        if configuration.head_type and not predicted
        else None,
        memory={"buffers": mib} if mib else {},
        marks=marks,
        synthetic=synthetic,
    )


def law(name: str, *cells: CellRecord) -> Law:
    return next(law for law in check(cells) if law.name == name)


def test_without_cells_every_law_says_what_to_add() -> None:
    laws = check([])
    assert [x.name for x in laws] == ["layers", "parallel-funds", "kv-funds", "head-bits", "n-max"]
    assert {x.verdict for x in laws} == {"not measured"}
    assert all(x.detail.startswith("not measured: ") for x in laws)


def test_layers_on_the_host_are_compared_with_all_layers_without_mtp() -> None:
    full = cell(27.4)
    holds = law("layers", full, cell(25.0, layers=42, head_type="Q6_K", n_max=2))
    assert holds.verdict == "holds"
    assert "0.91x" in holds.detail
    assert len(holds.cells) == 2
    fails = law("layers", full, cell(30.0, layers=42, head_type="Q6_K", n_max=2))
    assert fails.verdict == "fails"
    close = law("layers", full, cell(27.5, layers=42, head_type="Q6_K", n_max=2))
    assert close.verdict == "unclear"
    # MTP with all layers says nothing about this, and neither does another cache.
    silent = law("layers", full, cell(40.0, head_type="Q6_K", n_max=2),
                 cell(90.0, layers=42, kv="q8_0", head_type="Q6_K", n_max=2))  # fmt: skip
    assert silent.verdict == "not measured"


def test_predicted_and_disturbed_cells_prove_no_law_of_layers() -> None:
    disturbed = cell(99.0, layers=42, head_type="Q6_K", n_max=2, marks=("busy",))
    guessed = cell(99.0, layers=40, head_type="Q6_K", n_max=2, predicted=True)
    assert law("layers", cell(27.4), disturbed, guessed).verdict == "not measured"


def test_what_frees_enough_funds_the_draft() -> None:
    cells = [
        cell(27, mib=7000),
        cell(40, mib=7450, head_type="Q6_K", n_max=2),
        cell(27, mib=6500, kv="q8_0"),
        cell(27, mib=7300, parallel=4),
    ]
    funded, short = law("kv-funds", *cells), law("parallel-funds", *cells)
    assert funded.verdict == "holds"
    assert "500 MiB" in funded.detail
    assert "450 MiB" in funded.detail
    assert short.verdict == "fails"
    assert law("kv-funds", *cells[:2]).detail == "not measured: add --kv f16,q8_0"


def test_head_bits_are_compared_on_the_same_ground() -> None:
    same = [
        cell(40, accepted=0.55, head_type="Q8_0", n_max=2),
        cell(40, accepted=0.50, head_type="Q2_K", n_max=2),
    ]
    # Another depth accepts less whatever the bits.
    other = cell(40, accepted=0.2, head_type="Q2_K", n_max=6)
    assert law("head-bits", *same, other).verdict == "holds"
    worse = cell(40, accepted=0.40, head_type="Q2_K", n_max=2)
    assert law("head-bits", same[0], worse).verdict == "fails"
    assert law("head-bits", same[0], other).verdict == "not measured"
    given = [cell(40, synthetic=True, head_type=h, n_max=2) for h in ("Q8_0", "Q2_K")]
    assert "given" in law("head-bits", *given).detail


def test_the_best_n_max_is_told_by_workload_and_predictions_are_named() -> None:
    two = cell(40, head_type="Q6_K", n_max=2)
    three = cell(35, head_type="Q6_K", n_max=3)
    assert law("n-max", two, three).verdict == "holds"
    guessed = cell(50, head_type="Q6_K", n_max=4, predicted=True)
    found = law("n-max", two, three, guessed)
    assert found.verdict == "fails"
    assert found.detail == "best here: prose 4 (predicted)"
    near = cell(40.3, head_type="Q6_K", n_max=4)
    assert law("n-max", two, near).verdict == "unclear"
    code = cell(60, head_type="Q6_K", n_max=3, workload="code")
    assert "prose 2, code 3" in law("n-max", two, three, code).detail
    assert law("n-max", two).verdict == "not measured"
