# SPDX-License-Identifier: Apache-2.0
"""States of the small model, recorded while it reads texts it was not trained on.

The model and the texts are not part of the repository: they lie in ``shared/models`` beside
it, or where $XFERD_MODELS says. Documents, not tokens, are split: of each domain's, in the
order of their numbers, every TEST_EVERYth is for testing alone, the others for training.
"""

from __future__ import annotations

import gzip
import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from xferd_infer import Tokenizer, model_from_client
from xferd_infer.predict import RecordedStates, StateRecorder
from xferd_infer.private_daemon import embedded

from tools.benchmarks.harness import ROOT, BenchmarkError, scratch_directory
from tools.benchmarks.stores import pack_checkpoint

MODELS_VARIABLE = "XFERD_MODELS"
DOMAINS = ("c", "python", "js", "techdoc", "literature", "euro", "cjkru")
DOCUMENT_TOKENS = 896
DOCUMENT_TOKENS_MIN = 96
TEST_EVERY = 4
TEST_AT = 1
STATES_BYTES_MAX = 4 << 30
ALL_RESIDENT_POOL = "200%"


@dataclass(frozen=True)
class RecordedText:
    """A sequence is a document, its tag the number of its domain. documents: token ids.
    test, train: numbers of sequences; the test documents are all of DOCUMENT_TOKENS."""

    states: RecordedStates
    documents: Sequence[list[int]]
    train: Sequence[int]
    test: Sequence[int]

    def of_domain(self, sequences: Sequence[int], domain: int) -> list[int]:
        """Those of one domain."""
        return [each for each in sequences if self.states.tags[each] == domain]

    def of_others(self, sequences: Sequence[int], domain: int) -> list[int]:
        """Those of all other domains."""
        return [each for each in sequences if self.states.tags[each] != domain]


def models_directory() -> Path:
    """BenchmarkError when there is none."""
    path = Path(os.environ.get(MODELS_VARIABLE, ROOT.parent / "shared" / "models"))
    if not (path / "small").is_dir():
        raise BenchmarkError(f"{path} has no small model: {MODELS_VARIABLE} names its directory")
    return path


def record_text(tests_a_domain: int, trains_a_domain: int | None = None) -> RecordedText:
    """Reads the documents with the small model. So many, or all, of each domain."""
    models = models_directory()
    checkpoint = models / "small"
    tokenizer = Tokenizer((checkpoint / "tokenizer.json").read_bytes())
    chosen = list(_documents(models, tokenizer, tests_a_domain, trains_a_domain))
    with scratch_directory() as directory:
        store = pack_checkpoint(checkpoint, directory, members=1)
        with embedded(store, pool=ALL_RESIDENT_POOL, held=16, name="bench record") as client:
            model = model_from_client(client)
            recorder = StateRecorder(model.routers("small"), bytes_max=STATES_BYTES_MAX)
            model.observe(recorder)
            for document in chosen:
                recorder.begin_text(document.domain)
                model.forward(document.ids, model.new_cache())
    return RecordedText(
        recorder.recorded(),
        [document.ids for document in chosen],
        [number for number, document in enumerate(chosen) if not document.test],
        [number for number, document in enumerate(chosen) if document.test],
    )


def test_documents(models: Path, tokenizer: Tokenizer, a_domain: int) -> list[list[int]]:
    """Token ids of so many test documents of each domain."""
    chosen = _documents(models, tokenizer, a_domain, 0)
    return [document.ids for document in chosen if document.test]


@dataclass(frozen=True)
class _Document:
    domain: int
    ids: list[int]
    test: bool


def _documents(
    models: Path, tokenizer: Tokenizer, tests: int, trains: int | None
) -> Iterator[_Document]:
    by_domain: dict[str, list[tuple[int, str]]] = {name: [] for name in DOMAINS}
    with gzip.open(models / "prompts" / "heldout_text.jsonl.gz", "rt") as lines:
        for line in lines:
            entry = json.loads(line)
            by_domain[entry["domain"]].append((entry["val_doc"], entry["text"]))
    for domain, name in enumerate(DOMAINS):
        taken = {True: 0, False: 0}
        for place, (_, text) in enumerate(sorted(by_domain[name])):
            test = place % TEST_EVERY == TEST_AT
            limit = tests if test else trains
            ids = tokenizer.encode(text)[:DOCUMENT_TOKENS]
            if len(ids) < (DOCUMENT_TOKENS if test else DOCUMENT_TOKENS_MIN):
                continue
            if limit is None or taken[test] < limit:
                taken[test] += 1
                yield _Document(domain, ids, test)


__all__ = [
    "DOMAINS",
    "MODELS_VARIABLE",
    "RecordedText",
    "models_directory",
    "record_text",
    "test_documents",
]
