"""Export the weights of a run: metadist export RUN.

Writes the weights that the run tested as a safetensors file, with protocol, method and test result
in its metadata. FewShotClassifier.load, metadist predict and init_from read it.
"""

from pathlib import Path

from metadist.cli.command import argument_parser
from metadist.files import prepare_output
from metadist.loggers.console import print_plain
from metadist.training import export_weights


def main() -> None:
    """Export from the command line."""
    parser = argument_parser(__doc__)
    parser.add_argument("run", metavar="RUN", type=Path, help="the directory of a finished run")
    parser.add_argument("--output", type=Path, help="default: RUN/weights.safetensors")
    options = parser.parse_args()
    output = options.output or options.run / "weights.safetensors"
    if options.output:
        prepare_output(output)
    path = export_weights(options.run, output)
    print_plain(f"{path} ({path.stat().st_size / 1000:.0f} kB)")
