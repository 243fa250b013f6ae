"""What the framework itself costs. python experiments/overhead.py --rounds 5."""

from benchmarks.overhead import main

if __name__ == "__main__":
    main()
