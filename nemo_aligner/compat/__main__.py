# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""Run a script of NeMo-Aligner that imports parts of NeMo that no longer exist, unchanged:

    python -m nemo_aligner.compat train_gpt_sft.py trainer.devices=2 ...
    torchrun --nproc_per_node=2 -m nemo_aligner.compat train_gpt_sft.py ...

The modules of `nemo_aligner.compat.STAND_INS` can be imported in the script; nothing
else differs from `python train_gpt_sft.py`. A script that imports none of them (PPO, rejection
sampling, reward models) needs no runner.
"""

import os
import sys

from nemo_aligner.compat import install
from nemo_aligner.parallel.environment import adopt_mpi_ranks

# The script, for further processes of the job: Lightning starts them with the module and the
# overrides alone.
SCRIPT_VARIABLE = "NEMO_ALIGNER_COMPAT_SCRIPT"


def main() -> None:
    """Run the script that the first argument names, with the others."""
    arguments = sys.argv[1:]
    if arguments and arguments[0].endswith(".py"):
        os.environ[SCRIPT_VARIABLE] = os.path.abspath(arguments.pop(0))
    script = os.environ.get(SCRIPT_VARIABLE)
    if script is None:
        sys.exit(f"usage: {__doc__}")
    install()
    adopt_mpi_ranks(os.environ)
    own_spec = sys.modules["__main__"].__spec__
    sys.argv = [script, *arguments]
    sys.path[0] = os.path.dirname(script)
    # As `python script.py` has it, and the spec of this module: Lightning asks it how to start the
    # other processes.
    code = compile(open(script, "rb").read(), script, "exec")
    module = sys.modules["__main__"]
    module.__dict__.update(__file__=script, __spec__=own_spec, __doc__=None)
    exec(code, module.__dict__)


if __name__ == "__main__":
    main()
