"""metadist against its rivals. python experiments/benchmark.py --rounds 5."""

from benchmarks.rounds import main

if __name__ == "__main__":
    main()
