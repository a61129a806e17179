"""The campaign from the command line: `python -m tests.faults --help`."""

import os

os.environ.setdefault("OMP_WAIT_POLICY", "passive")
os.environ.setdefault("OMP_NUM_THREADS", "1")  # processes are forked, which threads of OpenMP do not survive
os.environ.setdefault("HF_HUB_OFFLINE", "1")

from tests.faults.campaign import main

if __name__ == "__main__":
    main()
