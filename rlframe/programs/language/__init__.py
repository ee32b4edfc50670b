"""Runs in which a language model learns: trajectory service, policy server, environments and learner as one program."""

from rlframe.programs.language.description import LanguageExperiment
from rlframe.programs.language.run import train

__all__ = ["LanguageExperiment", "train"]
