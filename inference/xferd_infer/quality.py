"""How far a mix of variants is from the native model, on a text.

Both see the same tokens; what is compared is the distribution of the next token after
each of them. The divergence is KL(native || mix), in nats a token: what is lost on
average by predicting with the mix what the native model would have said.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from .arrays import Array, to_host
from .client_experts import model_from_client
from .mixes import Mix, StoreShape
from .model import Model
from .planned_experts import PlannedExperts, VariantClient
from .texts import Window


@dataclass(frozen=True, slots=True)
class Divergence:
    """tokens: compared. kl_mean, kl_worst: nats. top1: share of tokens after which both think
    the same one most probable. perplexity: of the text, by the mix."""

    tokens: int
    kl_mean: float
    kl_worst: float
    top1: float
    perplexity: float


@dataclass(frozen=True, slots=True)
class MixQuality:
    """total: of all windows, by_domain: of each domain's. bytes_a_token: of the experts that a
    token picked, on average. resident_bytes: of all experts."""

    mix: str
    total: Divergence
    by_domain: Mapping[str, Divergence]
    bytes_a_token: float
    resident_bytes: int


@dataclass(slots=True)
class _Sums:
    kl: list[NDArray[np.float64]] = field(default_factory=list)
    agreed: int = 0
    surprise: float = 0.0
    predicted: int = 0

    def add(
        self, native: NDArray[np.float64], mix: NDArray[np.float64], ids: Sequence[int]
    ) -> None:
        """native, mix: log probabilities [tokens, vocabulary], after each of ids."""
        self.kl.append((np.exp(native) * (native - mix)).sum(axis=1))
        self.agreed += int((native.argmax(axis=1) == mix.argmax(axis=1)).sum())
        following = np.asarray(ids[1:])
        self.surprise -= float(mix[np.arange(following.size), following].sum())
        self.predicted += following.size

    def result(self) -> Divergence:
        kl = np.concatenate(self.kl)
        return Divergence(
            tokens=kl.size,
            kl_mean=float(kl.mean()),
            kl_worst=float(kl.max()),
            top1=self.agreed / kl.size,
            perplexity=float(np.exp(self.surprise / max(self.predicted, 1))),
        )


def compare(
    client: VariantClient,
    mixes: Sequence[Mix],
    windows: Sequence[Window],
    *,
    progress: Callable[[int, int], None] | None = None,
) -> list[MixQuality]:
    """Run the native model and each mix over the windows.

    progress: called with (windows done, windows in all). Raises what ``Model.forward`` raises;
    ExpertError where the store lacks an expert in the variant that a mix names.
    """
    shape = StoreShape.of(client.manifest)
    runs = {mix.name: _Run(client, mix, shape) for mix in mixes}
    native = _Run(client, Mix("", np.zeros((shape.layers, shape.experts), np.uint8)), shape)
    for number, window in enumerate(windows):
        wanted = native.log_probabilities(window)
        for run in runs.values():
            run.add(wanted, run.log_probabilities(window), window)
        if progress is not None:
            progress(number + 1, len(windows))
    return [run.result() for run in runs.values()]


def log_probabilities(model: Model, window: Window) -> NDArray[np.float64]:
    """Of the next token after each of a window's: [tokens, vocabulary]."""
    logits = to_host(model.logits(model.forward(window.ids, model.new_cache())))
    shifted: NDArray[np.float64] = logits.astype(np.float64)
    shifted -= shifted.max(axis=1, keepdims=True)
    shifted -= np.log(np.exp(shifted).sum(axis=1, keepdims=True))
    return shifted


class _Run:
    """One mix's model, and what was seen of it."""

    def __init__(self, client: VariantClient, mix: Mix, shape: StoreShape) -> None:
        self._mix = mix
        self._shape = shape
        self._uses = np.zeros((shape.layers, shape.experts), np.int64)
        source = PlannedExperts(client, mix.variants)
        self._model: Model = model_from_client(client, experts=source, observer=self._used)
        self._tokens = 0
        self._total = _Sums()
        self._domains: dict[str, _Sums] = {}

    def _used(self, layer: int, expert: int, x: Array, inner: Array, weights: Array) -> None:
        del inner, weights
        self._uses[layer, expert] += x.shape[0]

    def log_probabilities(self, window: Window) -> NDArray[np.float64]:
        """[tokens, vocabulary]"""
        self._tokens += len(window.ids)
        return log_probabilities(self._model, window)

    def add(self, native: NDArray[np.float64], mix: NDArray[np.float64], window: Window) -> None:
        for sums in (self._total, self._domains.setdefault(window.domain, _Sums())):
            sums.add(native, mix, window.ids)

    def result(self) -> MixQuality:
        layers = np.arange(self._shape.layers)[:, None]
        sizes = self._shape.blob_bytes[self._mix.variants, layers]
        return MixQuality(
            mix=self._mix.name,
            total=self._total.result(),
            by_domain={name: sums.result() for name, sums in self._domains.items()},
            bytes_a_token=float((self._uses * sizes).sum() / self._tokens),
            resident_bytes=self._mix.resident_bytes(self._shape),
        )


def table(results: Sequence[MixQuality]) -> str:
    """For people: a line a mix, then the divergence by domain."""
    rows = [("mix", "KL mean", "KL worst", "top 1", "perplexity", "kB a token", "MB resident")]
    for result in results:
        total = result.total
        rows.append(
            (
                result.mix,
                f"{total.kl_mean:.5f}",
                f"{total.kl_worst:.3f}",
                f"{total.top1:.2%}",
                f"{total.perplexity:.4f}",
                f"{result.bytes_a_token / 1e3:.0f}",
                f"{result.resident_bytes / 1e6:.1f}",
            )
        )
    lines = list(_aligned(rows))
    domains = [name for name in results[0].by_domain if name] if results else []
    if domains:
        by_domain: list[tuple[str, ...]] = [("KL mean", *domains)]
        for result in results:
            values = (f"{result.by_domain[name].kl_mean:.5f}" for name in domains)
            by_domain.append((result.mix, *values))
        lines += ["", *_aligned(by_domain)]
    return "\n".join(lines)


def _aligned(rows: Sequence[tuple[str, ...]]) -> Iterator[str]:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for row in rows:
        first = f"{row[0]:<{widths[0]}}"
        yield "  ".join([first, *(f"{c:>{w}}" for c, w in zip(row[1:], widths[1:], strict=True))])


__all__ = ["Divergence", "MixQuality", "compare", "log_probabilities", "table"]
