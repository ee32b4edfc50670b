"""Parameters under rising versions: what gives them (`ParamSource`), and the stores that they lie in.

A version is packed once, by its learner, and unpacked where it acts; between the two it travels as it is.
"""

from rlframe.params.files import FileParamStore
from rlframe.params.packing import PackedParams
from rlframe.params.shared import SharedParamStore
from rlframe.params.source import ParamSource
from rlframe.params.store import Attempt, ParamStore

__all__ = [
    "Attempt",
    "FileParamStore",
    "PackedParams",
    "ParamSource",
    "ParamStore",
    "SharedParamStore",
]
