"""Keys and values of earlier tokens. A sparse layer keeps only those that entered it.

Shapes: T tokens kept, G key/value heads, E head dim.
"""

from __future__ import annotations

from torch import Tensor, nn


class LayerCache:
    """Keys and values of one layer, in buffers that grow by doubling."""

    def __init__(self, owner: KVCache):
        self.owner = owner
        self.tokens = 0
        self._buffers: list[Tensor] = []

    @property
    def start(self) -> int:
        """Position of the first token of the current call."""
        return self.owner.length

    def append(self, *new_BSGE: Tensor) -> list[Tensor]:
        """Adds the keys and the values of new tokens; returns those of all, [B, T, G, E]."""
        end = self.tokens + new_BSGE[0].shape[1]
        if not self._buffers or end > self._buffers[0].shape[1]:
            self._grow(new_BSGE, max(2 * self.tokens, end))
        for buffer, new in zip(self._buffers, new_BSGE, strict=True):
            buffer[:, self.tokens:end] = new
        self.tokens = end
        return [buffer[:, :end] for buffer in self._buffers]

    def _grow(self, new_BSGE: tuple[Tensor, ...], capacity: int) -> None:
        grown = [new.new_empty(new.shape[0], capacity, *new.shape[2:]) for new in new_BSGE]
        for buffer, old in zip(grown, self._buffers):  # noqa: B905 - no buffers before the first token
            buffer[:, :self.tokens] = old[:, :self.tokens]
        self._buffers = grown


class KVCache:
    """The caches of all layers of a model for one sequence.

    Attributes:
        length: Tokens seen so far.
    """

    def __init__(self):
        self.length = 0
        self._layers: dict[tuple[nn.Module, int], LayerCache] = {}

    def layer(self, module: nn.Module, index: int) -> LayerCache:
        """The cache of layer `index` of a module (a stack's layers are numbered)."""
        return self._layers.setdefault((module, index), LayerCache(self))

    def executed_tokens(self) -> int:
        """Layer executions of tokens so far, over all layers."""
        return sum(layer.tokens for layer in self._layers.values())

    def bytes(self) -> int:
        """Memory of the buffers."""
        return sum(b.numel() * b.element_size() for layer in self._layers.values() for b in layer._buffers)
