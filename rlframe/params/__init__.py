"""Parameter versions: how a learner publishes them, and how inferencers get them.

A learner packs each version once and publishes the packed version in its `Publication`. An inferencer reads the newest
version in one of three ways. If the learner is not in its process, a `ParamReader` chooses the way.

    Learner -> Packing                      packing.py: packs a tree into few arrays (`PackedParams`)
            -> Publication                  publication.py: stores the newest version
                 same process:   read directly (`LocalParams`, the base class)
                 same machine:   PublicationReader, through shared memory
                 elsewhere:      a call of `get_packed`; under Ray, the arrays come from Ray's object store
                                 (engines/ray_nodes/params.py)
    as_packed_source -> Refresher -> Inferencer
                                            reader.py: chooses the way (`ParamReader`), and follows new versions

Example: an inferencer gets a version from the learner in another process of the machine.

1. `Learner.step` ends with `Publication.publish(7, packed)`.
2. The inferencer, which has version 6, calls `ParamReader.get_packed(6)`. A `PublicationReader` reads the arrays from
   shared memory (publication.py describes the steps). The call returns (7, `PackedParams`).
3. The inferencer uploads the packed arrays without change, and unpacks the tree inside its jitted call.

In the elastic topology, the learner sends each version to a `ParamStore` (rlframe.coordinator), which is another
node. The `Publication` is in this store, because the store continues to run if the learner dies.
"""

from rlframe.params.packing import PackedParams
from rlframe.params.reader import ParamSource

__all__ = ["PackedParams", "ParamSource"]
