"""The same bits for any strategy, number of workers and chunk size, on any processor."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from bit_identity import Case, compare

SCRIPT = Path(__file__).with_name("bit_identity.py")
FEATURES = [
    "",
    "ATEN_CPU_CAPABILITY=default",
    "ATEN_CPU_CAPABILITY=avx2",
    "ATEN_CPU_CAPABILITY=avx512",
    "MKL_CBWR=COMPATIBLE",
    "MKL_CBWR=AVX2",
    "ONEDNN_MAX_CPU_ISA=AVX2",
]


def test_some_cases_are_identical_in_some_worlds():
    cases = [
        Case("maml", "stride", native=True, tasks=5),
        Case("maml_plus_plus", "max", native=False, tasks=5),
        Case("meta_sgd", "sinusoid", native=True, tasks=7),
    ]
    worlds, chunk_sizes = [("rpc", 2), ("allreduce", 3)], (1, 3, "auto")
    assert compare(cases, worlds, timeout=300.0, chunk_sizes=chunk_sizes) == []


@pytest.mark.slow
@pytest.mark.parametrize("features", FEATURES)
def test_a_larger_sample_is_identical_in_all_worlds_with_other_processor_features(features):
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    environment.update(dict([features.split("=")]) if features else {})
    seed = FEATURES.index(features) + 1
    outcome = subprocess.run(
        [sys.executable, str(SCRIPT), "40", str(seed)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=3600,
    )
    assert outcome.stdout.strip().endswith("identical"), outcome.stdout + outcome.stderr[-2000:]
