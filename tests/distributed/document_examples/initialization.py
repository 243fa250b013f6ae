# fmt: off
# ruff: noqa
"""Documents 000 and 001, "Initialization and Synchronization"."""
import argparse

import metadist as todist

seen = {}


def parse_arguments():
    parser = argparse.ArgumentParser()
    parser.add_argument('--epochs', type=int, default=3)
    args = parser.parse_args()

    return args

def worker_init_fn():
    # set process title, seeding, etc.
    seen['initialized'] = todist.rpc_is_initialized()

@todist.auto_init_rpc(worker_init_fn)
def main():
    # Your code here
    args = parse_arguments()
    seen['epochs'] = args.epochs

if __name__ == '__main__':
    main()
