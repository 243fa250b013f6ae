"""Strategies: how a meta-batch is carried out. All give the same loss and the same gradient."""

from metadist.training.strategies.allreduce import AllReduceStrategy
from metadist.training.strategies.local import LocalStrategy
from metadist.training.strategies.rpc import RpcStrategy
from metadist.training.strategies.strategy import Mapper, Strategy

__all__ = ["AllReduceStrategy", "LocalStrategy", "Mapper", "RpcStrategy", "Strategy"]
