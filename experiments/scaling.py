"""Step time against workers, tasks and parameters. python experiments/scaling.py."""

from benchmarks.scaling import main

if __name__ == "__main__":
    main()
