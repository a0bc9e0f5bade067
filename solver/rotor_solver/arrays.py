"""A chain as the arrays that the compiled programs work on."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rotor_solver.chain import Chain

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class ChainArrays:
    """Costs in bytes and seconds, and the memory that the recurrence's conditions ask for.

    With G(i) the gradients of stages i … L-1, and held = |a_L| if the caller keeps the output:

        base_l          = |a_{l+1}| + G(l+1) + held for l < L; 0 for l = L
        check_need_ij   = the most of [k > i]·|a_k| + |a_{k+1}| + scratch_k for k = i … j-1
        backward_need_k = what is in memory during B_i, without a_i and what came before it, and at least what is
                          there after it. Row 0 is for l = L: ā was made before the loss, and a_L of the last stage
                          is still inside it. Row 1 is for l < L: ā was made again after the loss.

    `released` is what a run of stage i with a graph frees of a_i: row 0 where a_i stands alone, row 1 where it lies in
    ā_i. `first` has L+1 entries: the options of stage i are first[i] … first[i+1]-1. Arrays are laid out as `kernels`
    documents them.
    """

    activation: Ints
    run: Floats
    check_need: Ints
    base: Ints
    first: Ints
    seconds: Floats
    saved: Ints
    forward_need: Ints
    backward_need: Ints
    released: Ints
    loss_time: float
    loss_need: int

    @classmethod
    def of(cls, chain: Chain) -> ChainArrays:
        length = len(chain)
        activation = np.array(chain.activation, np.int64)
        gradient = np.array([stage.gradient for stage in chain.stages], np.int64)
        left = np.concatenate([np.cumsum(gradient[::-1])[::-1], [0]]).astype(np.int64)
        held = chain.activation[-1] if chain.output_held and length else 0
        options = [(i, option) for i, stage in enumerate(chain.stages) for option in stage.options]
        saved = np.array([option.saved for _, option in options], np.int64)
        backward = np.array(
            [
                [
                    max(
                        during + left[i + 1] + (held if replayed or i < length - 1 else 0) + option.saved + temp,
                        left[i] + held,
                    )
                    for i, option in options
                    for during in (chain.activation[i] + chain.activation[i + 1],)
                    for temp in (option.backward_temp_of_replay if replayed else option.backward_temp,)
                ]
                for replayed in (False, True)
            ],
            np.int64,
        ).reshape(2, len(options))
        return cls(
            activation=activation,
            run=np.concatenate([[0.0], np.cumsum([s.seconds_without_graph for s in chain.stages])]).astype(np.float64),
            check_need=_check_need(activation, [stage.temp_without_graph for stage in chain.stages]),
            base=np.concatenate([activation[1:] + left[1:] + held, [0]]).astype(np.int64),
            first=np.concatenate([[0], np.cumsum([len(s.options) for s in chain.stages])]).astype(np.int64),
            seconds=np.array([option.forward_time + option.backward_time for _, option in options], np.float64),
            saved=saved,
            forward_need=saved + np.array([option.forward_temp for _, option in options], np.int64),
            backward_need=backward,
            released=np.array(chain.released, np.int64).reshape(length, 2).T.copy(),
            loss_time=chain.loss_time,
            loss_need=chain.activation[-1] + chain.loss_temp,
        )


def _check_need(activation: Ints, scratch: list[int]) -> Ints:
    length = len(scratch)
    out = activation[1:] + np.array(scratch, np.int64)
    need = np.zeros((length + 1, length + 1), np.int64)
    for i in range(length):
        kept = activation[i:length].copy()
        kept[0] = 0
        need[i, i + 1 :] = np.maximum.accumulate(kept + out[i:])
    return need
