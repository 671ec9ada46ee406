"""Compare llama.cpp's logits with the training code's, through real draft steps.

Boundary: needs `llama_cpp` of the build that is checked, and the F32 and F16 or Q8_0 files
that `make_pair` wrote. Output contract: one JSON object; errors are the largest absolute
logit difference over all tokens; exit status 1 above the tolerances, which are shares of the
logits' standard deviation.

    $ python -m training.parity work

The released target is Q8_0. Its parity is stated against the training network with the same
Q8_0 rounding applied to its matrices, so that the figure measures the arithmetic alone.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import sys
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from numpy.typing import NDArray

from training.corpus import mixture
from training.make_pair import Recipe, load
from training.model import Drafter, Target
from training.train import STEPS, shifted

Floats = NDArray[np.float32]
# Largest absolute logit difference, as a share of the logits' standard deviation. The released
# target is Q8_0, for which llama.cpp rounds activations to 8 bits as well.
TOLERANCE = {"F32": 0.005, "F16": 0.05, "released": 0.15}
RUNS = (
    ("F32", ("F32", "F32"), True),
    ("F16", ("F16", "F16"), False),
    ("released", ("Q8_0", "F16"), False),
)


@dataclass(frozen=True, slots=True)
class Trace:
    """Target logits (N, V) and, at each anchor, draft logits (anchors, STEPS, V)."""

    logits: Floats
    draft: Floats


def trace_torch(target: Target, drafter: Drafter, tokens: list[int], anchors: list[int]) -> Trace:
    """Run the training code."""
    row = torch.tensor([tokens])
    documents = torch.zeros_like(row)
    with torch.no_grad():
        hidden, sliding, full = target(row, target.views(documents))
        views = target.views(documents, strict=True)
        current = torch.cat((torch.zeros_like(hidden[:, :1]), hidden[:, :-1]), 1)
        steps = []
        for k in range(STEPS):
            embedded = target.embed(shifted(row, k))
            logits, current = drafter.step(embedded, current, sliding, full, views)
            steps.append(logits[0, anchors])
        return Trace(target.logits(hidden)[0].numpy(), torch.stack(steps, 1).numpy())


class Engine:
    """llama.cpp with the pair loaded, over the low-level bindings."""

    def __init__(self, target: Path, drafter: Path, *, exact: bool) -> None:
        import llama_cpp as lib
        from llama_cpp import llama_cpp_ext as ext

        self.lib, self.ext = lib, ext
        self._quiet = lib.llama_log_callback(lambda level, text, data: None)
        lib.llama_log_set(self._quiet, ctypes.c_void_p(0))
        lib.llama_backend_init()
        model = lib.llama_model_default_params()
        model.load_mtp = True
        self.target_model = lib.llama_model_load_from_file(str(target).encode(), model)
        drafter_model = lib.llama_model_load_from_file(str(drafter).encode(), model)
        p = lib.llama_context_default_params()
        p.n_ctx = p.n_batch = p.n_outputs_max = p.n_outputs_max_per_seq = 1024
        p.n_ubatch, p.n_seq_max, p.n_threads, p.n_threads_batch = 512, 1, 2, 2
        p.swa_full, p.kv_unified = True, False
        # Exact: no flash attention, F32 cache. Else what llama-server does: both F16.
        p.flash_attn_type = 0 if exact else 1
        p.type_k = p.type_v = 0 if exact else 1
        self.target = lib.llama_init_from_model(self.target_model, p)
        p.ctx_type, p.ctx_other = lib.LLAMA_CONTEXT_TYPE_MTP, self.target
        p.n_outputs_max = p.n_outputs_max_per_seq = 4
        self.drafter = lib.llama_init_from_model(drafter_model, p)
        if not self.target or not self.drafter:
            raise RuntimeError("llama.cpp did not load the pair")
        ext.llama_set_embeddings_nextn(self.target, True, False)
        ext.llama_set_embeddings_nextn(self.drafter, True, True)
        self.vocab = lib.llama_vocab_n_tokens(lib.llama_model_get_vocab(self.target_model))
        self.width = lib.llama_model_n_embd_out(drafter_model)

    def tokenize(self, text: str) -> list[int]:
        """Tokenize with special tokens parsed and nothing added."""
        data = text.encode()
        room = (self.lib.llama_token * (len(data) + 8))()
        vocab = self.lib.llama_model_get_vocab(self.target_model)
        n = self.lib.llama_tokenize(vocab, data, len(data), room, len(room), False, True)
        return list(room[:n])

    def _row(self, pointer: Any, width: int) -> Floats:
        return np.ctypeslib.as_array(pointer, shape=(width,)).copy()

    def trace(self, tokens: list[int], prefill: int, anchors: list[int]) -> Trace:
        """Prefill, decode the rest one by one, draft at the anchors with the real tokens fed."""
        lib, ext = self.lib, self.ext
        batch = lib.llama_batch_init(1024, 0, 1)
        draft = lib.llama_batch_init(4, self.width, 1)
        fed = (lib.llama_token * 4)()
        draft.token = fed
        space = np.ctypeslib.as_array(draft.embd, shape=(4 * self.width,))
        logits = np.zeros((len(tokens), self.vocab), np.float32)
        hidden = np.zeros((len(tokens), self.width), np.float32)
        drafts: dict[int, Floats] = {}

        def decode(part: list[int], start: int) -> None:
            batch.n_tokens = len(part)
            for i, token in enumerate(part):
                batch.token[i], batch.pos[i], batch.logits[i] = token, start + i, 1
                batch.n_seq_id[i], batch.seq_id[i][0] = 1, 0
            if lib.llama_decode(self.target, batch):
                raise RuntimeError("llama_decode failed")
            for i in range(len(part)):
                logits[start + i] = self._row(lib.llama_get_logits_ith(self.target, i), self.vocab)
                pointer = ext.llama_get_embeddings_nextn_ith(self.target, i)
                hidden[start + i] = self._row(pointer, self.width)
            if start + len(part) in anchors:
                draft_at(start + len(part))

        def draft_at(anchor: int) -> None:
            state, out = hidden[anchor - 1].copy(), []
            for k in range(STEPS):
                fed[0], draft.pos[0], draft.n_tokens = tokens[anchor + k], anchor, 1
                draft.n_seq_id[0], draft.seq_id[0][0], draft.logits[0] = 1, 0, 1
                space[: self.width] = state
                if lib.llama_decode(self.drafter, draft):
                    raise RuntimeError("the draft step failed")
                out.append(self._row(lib.llama_get_logits_ith(self.drafter, 0), self.vocab))
                pointer = ext.llama_get_embeddings_nextn_ith(self.drafter, 0)
                state = self._row(pointer, self.width)
            drafts[anchor] = np.stack(out)

        decode(tokens[:prefill], 0)
        for i in range(prefill, len(tokens)):
            decode([tokens[i]], i)
        return Trace(logits, np.stack([drafts[a] for a in anchors]))


def rounded(target: Target, drafter: Drafter, kinds: tuple[str, str]) -> None:
    """Give the matrices the rounding of the files' types, in place."""
    with torch.no_grad():
        for model, name in zip((target, drafter), kinds, strict=True):
            kind = gguf.GGMLQuantizationType[name]
            for parameter in model.parameters():
                if parameter.dim() == 2 and name != "F32":
                    packed = gguf.quants.quantize(parameter.numpy(), kind)
                    parameter.copy_(torch.from_numpy(gguf.quants.dequantize(packed, kind).copy()))


def check_tokenizer(engine: Engine, vocabulary: Any, lines: int) -> dict[str, int]:
    """Tokenize held-out lines with both and count the equal ones."""
    texts: list[str] = []
    for workload in mixture.SHARES:
        for sample in islice(mixture.held_out(5, workload), lines // len(mixture.SHARES) + 1):
            texts += [line for line in mixture.render(sample).split("\n") if line]
    texts = sorted(set(texts))[:: max(1, len(set(texts)) // lines)][:lines]
    equal = sum(
        engine.tokenize(t) == ids for t, ids in zip(texts, vocabulary.encode(texts), strict=True)
    )
    return {"lines": len(texts), "equal": equal}


def main() -> None:
    """Compare, print, judge."""
    parser = argparse.ArgumentParser(prog="python -m training.parity")
    parser.add_argument("work", type=Path)
    work = parser.parse_args().work
    report: dict[str, Any] = {}
    failed = False
    for label, kinds, exact in RUNS:
        target, drafter, vocabulary = load(Recipe(), work)
        rounded(target, drafter, kinds)
        engine = Engine(
            work / f"target-{kinds[0]}.gguf", work / f"mtp-{kinds[1]}.gguf", exact=exact
        )
        if "tokenizer" not in report:
            report["tokenizer"] = check_tokenizer(engine, vocabulary, 1000)
        text = "".join(mixture.render(s) for s in islice(mixture.held_out(9, "prose"), 4))
        tokens = vocabulary.encode([text])[0][:320]
        anchors = [200, 201, 210, 260, 300]
        ours = trace_torch(target, drafter, tokens, anchors)
        theirs = engine.trace(tokens, 200, anchors)
        error = np.abs(ours.logits - theirs.logits)
        draft_error = np.abs(ours.draft - theirs.draft)
        report[label] = {
            "files": kinds, "prefill": float(error[:200].max()), "decode": float(error[200:].max()),
            "draft_steps": [round(float(draft_error[:, k].max()), 5) for k in range(STEPS)],
            "logit_std": float(ours.logits.std()), "draft_logit_std": float(ours.draft.std()),
            "tolerance_of_std": TOLERANCE[label],
            "same_argmax": float((ours.logits.argmax(-1) == theirs.logits.argmax(-1)).mean()),
            "same_draft_argmax": float((ours.draft.argmax(-1) == theirs.draft.argmax(-1)).mean()),
        }  # fmt: skip
        failed |= float(error.max()) > TOLERANCE[label] * float(ours.logits.std())
        failed |= float(draft_error.max()) > TOLERANCE[label] * float(ours.draft.std())
    failed |= report["tokenizer"]["equal"] != report["tokenizer"]["lines"]
    print(json.dumps(report, indent=2))
    sys.exit(int(failed))


if __name__ == "__main__":
    main()
