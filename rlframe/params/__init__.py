"""Versions of the parameters, and how they travel from a learner to the inferencers.

A learner packs each version once and puts it into its `Publication`. An inferencer reads the newest version from there,
in one of three ways. `ParamReader` chooses the way.

    Learner -> Packing                      packing.py: a tree as few arrays (`PackedParams`)
            -> Publication                  publication.py: the newest version
                 same process:   read directly (`LocalParams`, the base class)
                 same machine:   PublicationReader, through shared memory
                 elsewhere:      a call of `get_packed`
    ParamReader -> Refresher -> Inferencer  reader.py: chooses the way, and follows new versions

Example: one version travels from the learner to an inferencer in another process of the machine.

1. `Learner.step` ends with `Publication.publish(7, packed)`.
2. The inferencer calls `ParamReader.get_packed(6)`, which uses a `PublicationReader`. The two processes copy the arrays
   through shared memory (publication.py has the steps). The call returns (7, `PackedParams`).
3. The inferencer uploads the few arrays without change, and unpacks the tree inside its jitted call.

In the elastic topology, the publication is in the coordinator's `ParamStore`. The store's process outlives the learner,
and the learner puts each version there.
"""

from rlframe.params.packing import PackedParams
from rlframe.params.source import ParamSource

__all__ = ["PackedParams", "ParamSource"]
