"""Tensor parallelism on one machine: one process per rank, started, kept in step and ended together.

The process that is asked for tokens is rank 0, the leader. It starts the other ranks (`launch.Ranks`), which agree on
what they run (`agreement`), load their parts of the weights (`sharded`) and then repeat every call that the leader's
model gets (`leader`, `worker`), with sums over the ranks where a product needs them all (`collectives`). Beside that,
every process watches the others (`pulse`): a rank that dies, hangs or differs ends all of them, with one message.

This module stays free of torch: a worker watches before it imports anything that takes long.
"""

from flashstep.ranks.faults import AgreementError, Faults, RankFailure

__all__ = ["AgreementError", "Faults", "RankFailure"]
