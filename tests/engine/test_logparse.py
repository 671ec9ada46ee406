"""Facts come out of logs, and no line is too odd."""

from __future__ import annotations

import signal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from browndwarf.engine import logparse
from browndwarf.engine.diagnose import diagnose, out_of_memory_line
from browndwarf.engine.spawn import Exit
from browndwarf.errors import ServerCrashed, ServerKilled

LOG = """0.00.004.772 I srv    load_model: loading model 't.gguf'
0.00.015.383 I load_tensors: offloaded 21/21 layers to GPU
0.00.015.383 I load_tensors:        CUDA0 model buffer size =    17.50 MiB
0.00.016.784 I llama_kv_cache:      CUDA0 KV buffer size =    10.00 MiB
0.00.025.149 I sched_reserve: reserving ...
0.00.028.311 I sched_reserve:      CUDA0 compute buffer size =    10.27 MiB
0.00.029.589 I common_speculative_init_result: loading draft model 'h.gguf'
0.00.033.591 W llama_kv_cache: layer   1: sharing with layer 19
0.00.037.161 I load_tensors:        CUDA0 model buffer size =     3.26 MiB
0.00.037.623 I sched_reserve: reserving ...
0.00.038.365 I sched_reserve:        CUDA0 compute buffer size =     8.75 MiB
0.00.041.542 I sched_reserve: reserving ...
0.00.042.574 I sched_reserve:        CUDA0 compute buffer size =     9.75 MiB
0.00.045.416 I srv  llama_server: model loaded
0.00.161.422 I slot print_timing: id  0 | task 0 | draft acceptance = 0.40000 (   12 accepted /    30 generated), mean len =  2.20
0.00.161.436 I slot print_timing: id  0 | task 0 |      acc per pos = (0.500, 0.400, 0.300)
slot print_timing: draft acceptance rate = 0.57576 (   171 accepted /   297 generated)
0.00.169.000 E srv    send_error: something
"""  # noqa: E501


def test_buffers_are_told_apart_by_context() -> None:
    facts = logparse.parse_log(LOG)
    assert facts.total_mib("model", "target") == 17.5
    assert facts.total_mib("model", "draft") == 3.26
    assert facts.total_mib("KV") == 10.0
    assert facts.offloaded == (21, 21)
    assert facts.draft_offloaded is None


def test_a_reservation_made_again_replaces_the_first() -> None:
    facts = logparse.parse_log(LOG)
    assert facts.total_mib("compute", "target") == 10.27
    assert facts.total_mib("compute", "draft") == 9.75
    assert facts.total_mib(device="CUDA0") == pytest.approx(17.5 + 10 + 10.27 + 3.26 + 9.75)


def test_acceptance_is_read_in_both_forms() -> None:
    new, old = logparse.parse_log(LOG).acceptance
    assert (new.accepted, new.generated, new.mean_length) == (12, 30, 2.2)
    assert new.per_position == (0.5, 0.4, 0.3)
    assert (old.rate, old.mean_length, old.per_position) == (0.57576, None, ())


def test_warnings_and_errors_are_collected() -> None:
    facts = logparse.parse_log(LOG)
    assert facts.warnings == ("llama_kv_cache: layer   1: sharing with layer 19",)
    assert facts.errors == ("srv    send_error: something",)


def test_phases_follow_each_other() -> None:
    seen = []
    phase = "starting"
    for line in LOG.splitlines():
        phase = logparse.phase_of([line], phase)
        if phase not in seen:
            seen.append(phase)
    assert seen == ["loading model", "loading drafter", "ready"]


def test_dots_are_a_share() -> None:
    assert logparse.dots_share("loading\n" + "." * 42 + "\n") == 0.42
    assert logparse.dots_share("no dots. here") is None


@given(st.text())
def test_any_log_is_survived(text: str) -> None:
    logparse.parse_log(text)
    logparse.phase_of(text.splitlines())
    logparse.dots_share(text)


@given(st.text(), st.sampled_from([Exit(code=1), Exit(code=0), Exit(signal=11), Exit(signal=9)]))
def test_any_end_has_a_diagnosis(text: str, exit_: Exit) -> None:
    error = diagnose(exit_, text)
    assert error.what
    assert error.fix


@pytest.mark.parametrize(
    "line",
    [
        "ggml_cuda_host_malloc: failed to allocate 64.00 MiB of pinned memory: out of memory",
        "sched_reserve: compute buffer allocation failed, retrying without pipeline parallelism",
        "srv  alloc: failed to allocate memory for prompt cache state: std::bad_alloc",
    ],
)
def test_harmless_allocation_failures_do_not_count(line: str) -> None:
    assert out_of_memory_line(line) is None
    assert type(diagnose(Exit(signal=signal.SIGSEGV), line)) is ServerCrashed


def test_a_clean_end_that_nobody_asked_for_came_from_outside() -> None:
    log = "I srv    operator(): operator(): cleaning up before exit..."
    assert type(diagnose(Exit(code=0), log)) is ServerKilled
    assert type(diagnose(Exit(code=0), "")) is ServerCrashed


def test_the_drafter_is_named_where_it_is_at_fault() -> None:
    log = "I common: loading draft model 'h.gguf'\nE model is corrupted or incomplete"
    assert "(the drafter)" in diagnose(Exit(code=1), log).what
    assert "(the target)" in diagnose(Exit(code=1), log.splitlines()[1]).what


def test_the_kernels_killer_is_hinted_at() -> None:
    error = diagnose(Exit(signal=9), "I loading")
    assert type(error) is ServerKilled
    assert "memory" in error.why
