"""Classify images with a trained model: metadist predict RUN --support DIR --query DIR.

RUN is a run directory, a checkpoint, a weights file or the name of pretrained weights. The support
directory has a folder of a few images for each class. Prints the predicted class of each query
image and its probability, and writes a CSV file with the probabilities of all classes.
"""

import csv
import io
from pathlib import Path

from metadist.cli.command import add_trust_code, argument_parser
from metadist.errors import UserError
from metadist.files import REDIRECT_OUTPUT, atomic_write, prepare_output
from metadist.inference import FewShotClassifier
from metadist.loggers.console import print_plain
from metadist.metrics import counted
from metadist.tasks.image_files import FORMATS, class_folders, images_below


def predict_folder(classifier: FewShotClassifier, support: Path, query: Path) -> list[list[str]]:
    """Classify all images of a directory.

    Args:
        classifier: the classifier, which is fitted to the support images.
        support: the directory of class folders.
        query: a directory of images, at any depth, or an image.

    Returns:
        One row per image: its path relative to `query`, the predicted class, and the probability of
        each class.

    Raises:
        UserError: a directory has no images, or an image cannot be read.
    """
    classes = class_folders(support)
    examples = [(file, image_class.name) for image_class in classes for file in image_class.files]
    files = [query] if query.is_file() else images_below(query)
    for folder, images in ((support, examples), (query, files)):
        if not images:
            below = "in class folders" if folder is support else "in it"
            raise UserError(f"{folder} has no images {below}: give another directory.")
    if empty := [image_class.name for image_class in classes if not image_class.files]:
        raise UserError(
            f"{support} has no images of {', '.join(empty)}: add some ({', '.join(FORMATS)}), or "
            "delete the folder."
        )
    classifier.fit([file for file, _ in examples], [name for _, name in examples])
    names = [file.name if file == query else file.relative_to(query).as_posix() for file in files]
    rows = []
    for name, probabilities in zip(names, classifier.predict_proba(files), strict=True):
        predicted = str(classifier.classes_[probabilities.argmax()])
        rows.append([name, predicted, *(f"{value:.6f}" for value in probabilities)])
    return rows


def main() -> None:
    """Predict from the command line."""
    parser = argument_parser(__doc__)
    parser.add_argument(
        "run",
        metavar="RUN",
        type=Path,
        help="run directory, checkpoint, weights file, or name of pretrained weights",
    )
    parser.add_argument("--support", metavar="DIR", type=Path, required=True)
    parser.add_argument("--query", metavar="DIR", type=Path, required=True)
    parser.add_argument(
        "--output", type=Path, default=Path("predictions.csv"), help="default: %(default)s"
    )
    parser.add_argument("--device", default="cpu", help="cpu (the default), cuda, cuda:N or auto")
    add_trust_code(parser)
    options = parser.parse_args()
    prepare_output(options.output)
    classifier = FewShotClassifier.load(
        options.run, device=options.device, trust_code=options.trust_code
    )
    rows = predict_folder(classifier, options.support, options.query)
    header = ["image", "prediction", *map(str, classifier.classes_)]
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows([header, *rows])
    content = text.getvalue().encode(errors="surrogateescape")
    atomic_write(options.output, content, REDIRECT_OUTPUT)
    table = [("image", "prediction", "probability")]
    table += [(row[0], row[1], f"{max(map(float, row[2:])):.1%}") for row in rows]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    lines = [
        f"{image:<{widths[0]}}  {prediction:<{widths[1]}}  {probability:>{widths[2]}}"
        for image, prediction, probability in table
    ]
    print_plain("\n".join([*lines, f"{counted(len(rows), 'image')}: {options.output}"]))
