"""A mixture of experts (Shazeer et al., 2017; Fedus et al., "Switch Transformers", 2022): a few MLPs for each token.

Rows are sorted by expert, so that each expert computes all of its rows at once. Each row adds up its experts' results
in the order of their rank, whatever else is in the batch.
"""

from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from actorserve.errors import ModelError
from workers.kernels.row_ops import Activation
from workers.kernels.tiles import RowTiles, probe
from workers.kernels.triton.grouped import SortedRows, StackedWeight, add_experts, agreeing_rows, choose_experts, run
from workers.models.blocks import GatedMlp
from workers.models.decoder import Tiles
from workers.models.random_rows import RandomRows, RowProbe
from workers.weights.decoder_weights import Weights

_ROUTER_TILES, _ROUTER_BASE_ROWS, _ROUTER_OVERHEAD_ROWS = (1, 16, 64), 16, 4


class Experts(Protocol):
    """The router and the experts of one layer."""

    def __call__(self, x: Tensor, residual: Tensor, tiles: Tiles) -> Tensor:
        """[T, hidden] and ``residual`` [T, hidden] -> ``residual`` plus the experts' results."""
        ...

    def row_functions(self, rows: RandomRows) -> list[RowProbe]:
        """The functions that run in ``tiles``."""
        ...


def make_experts(weights: Weights, prefix: str) -> Experts:
    """The experts of a layer, computed in the way that suits the device. Raises: ModelError."""
    return GroupedExperts(weights, prefix) if weights.runs_grouped else LoopedExperts(weights, prefix)


class GroupedExperts:
    """On a GPU: all experts at once, and the host waits for nothing.

    The router multiplies in the type of the activations, in which files have its weight, with float32 sums.
    """

    def __init__(self, weights: Weights, prefix: str) -> None:
        config = weights.config
        if config.activation == "relu":
            raise ModelError("an MLP gated by ReLU is not supported")
        self._activation: Activation = config.activation
        self._ranks = config.experts_per_token
        self._normalizes = config.normalize_expert_weights
        router = weights.matrix(f"{prefix}gate").to(weights.dtype)
        self._router = StackedWeight("plain", router[None], config.hidden_size)
        names = [f"{prefix}experts.{number}." for number in range(config.num_experts)]
        self._gate_up = weights.stacked([(f"{name}gate_proj", f"{name}up_proj") for name in names])
        self._down = weights.stacked([(f"{name}down_proj",) for name in names])
        self._numbers = torch.arange(config.num_experts + 1, device=weights.device)
        self._gated = weights.row_ops.gated
        for weight in (self._router, self._gate_up, self._down):
            agreeing_rows(weights.device, weights.dtype, weight.form)  # found now, because it waits for the device

    def __call__(self, x: Tensor, residual: Tensor, tiles: Tiles) -> Tensor:
        logits = run(x, self._router, dtype=torch.float32)
        shares, experts = choose_experts(logits, self._ranks, self._normalizes)
        rows = SortedRows.by_expert(experts, self._numbers)
        inner = self._gated(run(x, self._gate_up, rows, gathers=True), self._activation)
        return add_experts(run(inner, self._down, rows, scatters=True), shares, residual)

    def row_functions(self, rows: RandomRows) -> list[RowProbe]:
        return []


class LoopedExperts:
    """One expert after another, each with all of its rows."""

    def __init__(self, weights: Weights, prefix: str) -> None:
        config = weights.config
        self._num_experts = config.num_experts
        self._experts_per_token = config.experts_per_token
        self._normalize = config.normalize_expert_weights
        self._router = weights.matrix(f"{prefix}gate")  # [num_experts, hidden]
        self._softmax = weights.row_ops.softmax
        self._mlps = [GatedMlp(weights, f"{prefix}experts.{number}.") for number in range(config.num_experts)]
        # The router computes in float32 in every numeric mode, so the tiles of the layers are not made for it.
        rows = RandomRows(config, weights.device, weights.dtype)
        sizes = probe(self._choose, rows.hidden, _ROUTER_TILES, _ROUTER_BASE_ROWS)
        self._router_tiles = RowTiles(sizes, _ROUTER_OVERHEAD_ROWS)

    def __call__(self, x: Tensor, residual: Tensor, tiles: Tiles) -> Tensor:
        shares, experts = self._router_tiles.run(self._choose, x)
        by_expert = experts.flatten().argsort(stable=True)  # places: row * experts_per_token + rank
        counts = experts.flatten().bincount(minlength=self._num_experts).tolist()
        used = [(mlp, count) for mlp, count in zip(self._mlps, counts, strict=True) if count]
        sizes = [count for _, count in used]
        places, tokens = (
            torch.split(all_rows, sizes) for all_rows in (by_expert, by_expert // self._experts_per_token)
        )
        results = x.new_empty((by_expert.shape[0], x.shape[1]))
        for (mlp, _), place, token in zip(used, places, tokens, strict=True):
            results.index_copy_(0, place, tiles.run(mlp.rows, x.index_select(0, token))[0])
        weighted = results.view(len(x), self._experts_per_token, -1) * shares.to(x.dtype).unsqueeze(-1)
        for rank in range(self._experts_per_token):
            residual = residual + weighted[:, rank]
        return residual

    def row_functions(self, rows: RandomRows) -> list[RowProbe]:
        return [(self._mlps[0].rows, rows.hidden)]

    def _choose(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """[R, hidden] -> each row's best experts, [R, experts_per_token]: shares of the result (float32) and numbers.

        The best expert comes first, among equals the lower number.
        """
        shares, experts = self._softmax(F.linear(x.float(), self._router)).sort(dim=-1, descending=True, stable=True)
        shares, experts = shares[:, : self._experts_per_token], experts[:, : self._experts_per_token]
        if self._normalize:
            shares = shares / shares.sum(dim=-1, keepdim=True)
        return shares, experts
