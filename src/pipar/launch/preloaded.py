"""What the processes of the server and of every device need; the fork server imports it once for all of them.

grpc is not among it: it does not survive a fork. Children do not collect what is imported here, which would copy the
memory that they share.
"""

from __future__ import annotations

import gc

from pipar.launch.uncollected import uncollected

with uncollected():
    # The first backward from a given gradient imports it, with sympy: a third of a second on every device.
    import torch.fx.experimental.symbolic_shapes  # noqa: F401

    import pipar.job.model_setup
    import pipar.job.workload
    import pipar.launch.assemble
    import pipar.storage.run_folder  # noqa: F401

gc.freeze()
