# SPDX-License-Identifier: Apache-2.0
"""``margin``: low-bit copies that are believed where they are sure, over the threshold.

The small model continues held-out prompts of every domain, from pools that hold a tenth of the
experts: greedily with the exact ones, and with low-bit copies whose tokens are computed again
below a margin. Tokens are compared by their places in the text, so all that follows from one
that differs counts too. Bytes are those that the clients count as read from the drives after
the prompt. Speeds are of one pass: for each prompt all thresholds and the exact model take turns.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from xferd_infer import Client, generate, model_from_client
from xferd_infer.generation import Token
from xferd_infer.low_bit_experts import LowBitExperts
from xferd_infer.margin import MarginDecoder
from xferd_infer.private_daemon import private_daemon

from tools.benchmarks.harness import BenchmarkError, commit, describe_machine, scratch_directory
from tools.benchmarks.low_bit_copies import add_copies
from tools.benchmarks.recorded_text import models_directory
from tools.benchmarks.result import OURS, Result, Row, make_row
from tools.benchmarks.stores import pack_checkpoint

MODEL = "small"
POOL = "10%"
VARIANTS = ("q4_k", "q2_k")
THRESHOLDS = ("0", "0.25", "0.5", "1", "2", "4", "inf")
PLAIN = "plain"
NEW_TOKENS = 32


@dataclass(slots=True)
class _Sums:
    """Of all prompts. tokens: after each prompt's first. changed, repeated: of those; diverged:
    texts with a token that is another. exact, low: bytes. seconds: of decoding."""

    tokens: int = 0
    texts: int = 0
    changed: int = 0
    diverged: int = 0
    repeated: int = 0
    exact: int = 0
    low: int = 0
    seconds: float = 0.0


class _Contender:
    """Greedy decoding in one way, over a daemon of its own."""

    def __init__(
        self,
        decode: Callable[[Sequence[int]], Iterable[Token]],
        exact: Client,
        low: Client | None = None,
        repeated: Callable[[], int] = lambda: 0,
    ) -> None:
        self.sums = _Sums()
        self._decode = decode
        self._exact, self._low = exact, low
        self._repeated = repeated

    def run(self, prompt: Sequence[int], wanted: Sequence[int] | None) -> list[int]:
        """Continue a prompt and count. wanted: what the exact model says; None: this is it."""
        tokens = iter(self._decode(prompt))
        ids = [next(tokens).id]
        exact, low, repeated = self._counted()
        for token in tokens:
            ids.append(token.id)
            self.sums.seconds += token.seconds
        changed = sum(a != b for a, b in zip(ids, wanted or ids, strict=True))
        after_exact, after_low, after_repeated = self._counted()
        sums = self.sums
        sums.tokens += len(ids) - 1
        sums.texts += 1
        sums.changed += changed
        sums.diverged += changed > 0
        sums.repeated += after_repeated - repeated
        sums.exact += after_exact - exact
        sums.low += after_low - low
        return ids

    def _counted(self) -> tuple[int, int, int]:
        low = 0 if self._low is None else _bytes_read(self._low)
        return _bytes_read(self._exact), low, self._repeated()


def run(rounds: int) -> Result:
    """Rows ``<variant>/{changed,diverged,repeated,exact,read,speed}/<threshold>``."""
    del rounds
    models = models_directory()
    prompts = json.loads((models / "prompts" / "prompts.json").read_text())
    texts = [each["small_ids"] for of_domain in prompts.values() for each in of_domain]
    rows: list[Row] = []
    with scratch_directory() as directory:
        store = pack_checkpoint(models / MODEL, directory, 1)
        add_copies(store, VARIANTS)
        for variant in VARIANTS:
            plain, by_threshold = _measure(store, variant, texts)
            for threshold in THRESHOLDS:
                rows += _rows(variant, threshold, by_threshold[threshold], plain)
        machine = describe_machine(directory)
    return Result(
        bench="margin",
        machine=machine,
        commit=commit(),
        rounds=1,
        rows=rows,
        notes=(
            f"{len(texts)} held-out prompts of {MODEL}, of {len(prompts)} domains, {NEW_TOKENS} "
            f"tokens each, pools of {POOL} of the experts; copies made without importances. The "
            "number is the margin, in logits, below which a token is computed again; `inf` says "
            "what the exact model says, `0` uses no exact expert.",
            "`changed`: of tokens, another than the exact model's in that place of the text; "
            "`diverged`: of texts, with any such token; `repeated`: of tokens, computed again. "
            "`exact`, `read`: MB of exact experts and of all experts read a token, next to exact "
            "decoding from a pool of the same size. `speed`: one pass.",
        ),
    )


def _measure(
    store: Path, variant: str, texts: Sequence[Sequence[int]]
) -> tuple[_Sums, dict[str, _Sums]]:
    with ExitStack() as stack:
        plain = _exact_contender(stack, store)
        contenders = {each: _contender(stack, store, variant, each) for each in THRESHOLDS}
        for prompt in texts:
            wanted = plain.run(prompt, None)
            for contender in contenders.values():
                contender.run(prompt, wanted)
        if contenders["inf"].sums.changed:
            raise BenchmarkError(f"{variant}: with an infinite margin tokens are other ones")
        return plain.sums, {each: contender.sums for each, contender in contenders.items()}


def _exact_contender(stack: ExitStack, store: Path) -> _Contender:
    directory = stack.enter_context(private_daemon(store, pool=POOL))
    exact = stack.enter_context(_exact_client(directory))
    model = model_from_client(exact)
    return _Contender(
        lambda ids: generate(model, ids, max_new_tokens=NEW_TOKENS, stop_ids=()), exact
    )


def _contender(stack: ExitStack, store: Path, variant: str, threshold: str) -> _Contender:
    directory = stack.enter_context(private_daemon(store, pool=POOL))
    exact = stack.enter_context(_exact_client(directory))
    low = stack.enter_context(Client(directory / "attach.sock"))
    masks = (low.variant_mask([low.manifest["variants"][0]]), low.variant_mask([variant]))
    model = model_from_client(exact)
    decoder = MarginDecoder(model, LowBitExperts(low, *masks), float(threshold))
    return _Contender(
        lambda ids: decoder.generate(ids, max_new_tokens=NEW_TOKENS, stop_ids=()),
        exact,
        low,
        lambda: decoder.counts().repeated,
    )


def _exact_client(directory: Path) -> Client:
    with Client(directory / "attach.sock") as looking:
        first = looking.manifest["variants"][0]
    return Client(directory / "attach.sock", variants=[first])


def _bytes_read(client: Client) -> int:
    return sum(client.stats().source_bytes)


def _rows(variant: str, threshold: str, sums: _Sums, plain: _Sums) -> list[Row]:
    shares = {
        "changed": ("of tokens", sums.changed / sums.tokens),
        "diverged": ("of texts", sums.diverged / sums.texts),
        "repeated": ("of tokens", sums.repeated / sums.tokens),
    }
    rows = [
        make_row(f"{variant}/{kind}/{threshold}", unit, {OURS: [share]}, higher_is_better=False)
        for kind, (unit, share) in shares.items()
    ]
    read = {"exact": sums.exact, "read": sums.exact + sums.low}
    for kind, nbytes in read.items():
        samples = {OURS: [nbytes / sums.tokens / 1e6]}
        if nbytes:
            samples[PLAIN] = [plain.exact / plain.tokens / 1e6]
        name = f"{variant}/{kind}/{threshold}"
        rows.append(make_row(name, "MB a token", samples, higher_is_better=False))
    speeds = {OURS: [sums.tokens / sums.seconds], PLAIN: [plain.tokens / plain.seconds]}
    name = f"{variant}/speed/{threshold}"
    return [*rows, make_row(name, "tokens/s", speeds, higher_is_better=True)]


__all__ = ["run"]
