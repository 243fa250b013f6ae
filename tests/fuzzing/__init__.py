"""A fuzz corpus of invalid configurations and corrupted files (`make fuzz`).

Every case runs `experiments/maml.py` (or `metadist replay`) in a process forked from one that has
imported everything. A case passes if the command exits with status 2, writes exactly one sentence
to standard error, and executes no code from a file. Corruptions from which a run recovers by
itself, as documented, are counted separately.
"""
