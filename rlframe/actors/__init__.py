"""Actors step environments with an inferencer and fill a replay buffer; an Evaluator measures returns."""

from rlframe.actors.actor import Actor
from rlframe.actors.evaluator import Evaluator

__all__ = ["Actor", "Evaluator"]
