# fmt: off
# ruff: noqa
"""Documents 000 and 001, "Worker selection"."""
import argparse

import metadist as todist

seen = {'results': [], 'saved': []}
args = argparse.Namespace(epochs=4, log_interval=2, save_interval=3)
writer, results, model = seen['results'], 'results', 'model'


@todist.rank_non_zero_only
def greet():
    print(f'Greetings from worker(rank={todist.get_rank()})!')

@todist.rank_zero_only
def save_checkpoint(model):
    seen['saved'].append(model)

@todist.rank_zero_only
def log_results(writer, results):
    writer.append(results)

@todist.auto_init_rpc()
def main():
    greet()

    todist.barrier()

    for epoch in range(args.epochs):
        todist.barrier()

        if epoch % args.log_interval == 0:
            log_results(writer, results)

        if epoch % args.save_interval == 0:
            save_checkpoint(model)
