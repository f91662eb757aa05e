"""EAGLE-3 draft training as a runbook: every line of logic behind the six notebooks."""

import os

# Idle OpenMP threads wait in the kernel, not in a loop: a process that spins while another wants its core made training
# steps ten times slower on two cores. Read when torch loads, so it stands before every import of it.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
