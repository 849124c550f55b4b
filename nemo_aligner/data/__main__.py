# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""The command line: `nemo-aligner inspect FILE --model MODEL`."""

from nemo_aligner.inspection import main

if __name__ == "__main__":
    main()
